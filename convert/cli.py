"""The command ``oled-convert``: to-orbax, to-hf, inspect, compare.

Promises: exit code 0 for success, 1 when ``compare`` finds a difference, 2 and one line for a user's mistake or a full
disk, 130 and one line for an interruption, 141 in silence when the reader of its output has gone. Never starts an
accelerator's backend, so that it runs beside a busy one.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from oled_jax.checkpoint import PARTIAL_SUFFIX, open_checkpoint
from oled_jax.convert.comparison import compare
from oled_jax.convert.inspection import as_text, inspect
from oled_jax.convert.staging import check_destination
from oled_jax.convert.to_hf import to_hf
from oled_jax.convert.to_orbax import to_orbax
from oled_jax.errors import OledError
from oled_jax.progress import ProgressLine, format_bytes
from oled_jax.version import __version__

EXIT_DIFFERENT = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + 2  # what a shell reports for a command that SIGINT ended
EXIT_BROKEN_PIPE = 128 + 13  # the same for SIGPIPE

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with ``argv`` (default: the process's arguments) and returns its exit code."""
    arguments = argparse.Namespace()
    try:
        try:
            _parser().parse_args(argv, arguments)
            # Orbax asks jax which process it is, and that starts a backend.
            import jax

            jax.config.update("jax_platforms", "cpu")
            return arguments.run(arguments)
        finally:
            sys.stdout.flush()  # a closed pipe shows here and not when the interpreter ends
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (OledError, OSError) as error:
        print(f"oled-convert: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print(f"oled-convert: interrupted{_kept(arguments)}", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "500MB" (decimal, as Hugging Face counts) or "2GiB"."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([KMGT]?B|[KMG]iB)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write for example 5GB, 500MB or 2GiB")
    return size


def _kept(arguments: argparse.Namespace) -> str:
    """What an interrupted command has left, in words."""
    if "destination" not in arguments:
        return ""
    partial = Path(f"{arguments.destination}{PARTIAL_SUFFIX}")
    return f"; finished work is kept in {partial}, and the same command resumes it" if partial.exists() else ""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise OledError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="oled-convert",
        description="Converts, inspects and compares LLaDA2.x checkpoints, streaming.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"oled-convert {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    command = commands.add_parser("to-orbax", help="published Hugging Face layout to a converted folder")
    _add_folders(command)
    command.set_defaults(run=_to_orbax)

    command = commands.add_parser("to-hf", help="any checkpoint to the published Hugging Face layout")
    _add_folders(command)
    command.add_argument(
        "--max-shard-size", type=parse_size, default="5GB", metavar="SIZE", help="largest shard (default: 5GB)"
    )
    command.set_defaults(run=_to_hf)

    command = commands.add_parser("inspect", help="what a folder holds; checks all of it but the weights' values")
    command.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder of either format")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("compare", help="config and every tensor of two folders, bit for bit")
    command.add_argument("a", type=Path, metavar="A", help="checkpoint folder of either format")
    command.add_argument("b", type=Path, metavar="B", help="checkpoint folder of either format")
    command.set_defaults(run=_compare)
    return parser


def _add_folders(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Work goes on in DST.partial, which gets its name at the end; the same command resumes what was interrupted."
    )
    command.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder")
    command.add_argument("destination", type=Path, metavar="DST", help="folder to create; must not exist")


def _to_orbax(arguments: argparse.Namespace) -> int:
    return _convert(arguments, to_orbax)


def _to_hf(arguments: argparse.Namespace) -> int:
    return _convert(arguments, to_hf, arguments.max_shard_size)


def _convert(arguments: argparse.Namespace, function, *settings: int) -> int:
    check_destination(arguments.source, arguments.destination)  # before the many headers of the source are read
    line = ProgressLine("converting")
    try:
        with open_checkpoint(arguments.source) as source:
            function(source, arguments.destination, *settings, progress=line)
            size = format_bytes(source.total_bytes)
    finally:
        line.close()
    print(f"{arguments.destination}: {size}, written at {line.rate()}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    with open_checkpoint(arguments.source) as source:
        facts = inspect(source)
    print(json.dumps(facts, indent=1) if arguments.json else as_text(facts))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    line = ProgressLine("comparing")
    try:
        with open_checkpoint(arguments.a) as a, open_checkpoint(arguments.b) as b:
            differences = compare(a, b, line)
            tensors = inspect(a)["tensors"]
    finally:
        line.close()
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences" if differences else f"equal: config and {tensors:,} tensors")
    return EXIT_DIFFERENT if differences else 0
