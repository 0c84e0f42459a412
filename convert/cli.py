"""The command ``oled-convert``: to-orbax, to-hf, inspect, compare. How one runs and ends is ``oled_jax.cli.running``.

Promises: exit code 1 when ``compare`` finds a difference, 0 for every other success. Never starts an accelerator's
backend, so that it runs beside a busy one. What an interrupt leaves is named, and the same command resumes it. What
takes time to import is imported by the command that was chosen.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from oled_jax.assets import model_folder
from oled_jax.cli.running import Parser, argument_type, command_parser, run_command
from oled_jax.progress import ProgressLine, counted, format_bytes, parse_bytes

EXIT_DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` and returns its exit code.

    Without ``argv`` it is the command line of the process, which is then owned and, after an interrupt, ended by it.
    """
    return run_command("oled-convert", _parser, argv, left_behind=_kept)


def _kept(arguments: argparse.Namespace) -> str:
    """What an interrupted command has left, in words."""
    if "partial" not in arguments or not arguments.partial.exists():
        return ""
    return f"; finished work is kept in {arguments.partial}, and the same command resumes it"


def _parser() -> Parser:
    description = "Converts, inspects and compares LLaDA2.x checkpoints, streaming."
    parser, commands = command_parser("oled-convert", description)

    command = commands.add_parser("to-orbax", help="published Hugging Face layout to a converted folder")
    _add_folders(command)
    command.set_defaults(run=_to_orbax)

    command = commands.add_parser("to-hf", help="any checkpoint to the published Hugging Face layout")
    _add_folders(command)
    command.add_argument(
        "--max-shard-size",
        type=argument_type(parse_bytes),
        default="5GB",
        metavar="SIZE",
        help="largest shard (default: 5GB)",
    )
    command.set_defaults(run=_to_hf)

    command = commands.add_parser("inspect", help="what a folder holds; checks all of it but the weights' values")
    command.add_argument("source", type=_source, metavar="SRC", help="checkpoint folder of either format, or demo")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("compare", help="config and every tensor of two folders, bit for bit")
    command.add_argument("a", type=_source, metavar="A", help="checkpoint folder of either format")
    command.add_argument("b", type=_source, metavar="B", help="checkpoint folder of either format")
    command.set_defaults(run=_compare)
    return parser


def _source(text: str) -> Path:
    """A checkpoint folder, which may be the one that ships with the package."""
    return Path(model_folder(text))


def _add_folders(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Work goes on in DST.partial, which gets its name at the end; the same command resumes what was interrupted."
    )
    command.add_argument("source", type=_source, metavar="SRC", help="checkpoint folder, or demo")
    command.add_argument("destination", type=Path, metavar="DST", help="folder to create; must not exist")


def _to_orbax(arguments: argparse.Namespace) -> int:
    from oled_jax.convert.to_orbax import to_orbax

    return _convert(arguments, to_orbax)


def _to_hf(arguments: argparse.Namespace) -> int:
    from oled_jax.convert.to_hf import to_hf

    return _convert(arguments, to_hf, arguments.max_shard_size)


def _convert(arguments: argparse.Namespace, function: Callable[..., None], *settings: int) -> int:
    from oled_jax.checkpoint import PARTIAL_SUFFIX, open_checkpoint
    from oled_jax.convert.staging import check_destination

    _stay_on_the_cpu()
    arguments.partial = Path(f"{arguments.destination}{PARTIAL_SUFFIX}")  # for _kept, which must not import
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
    from oled_jax.checkpoint import open_checkpoint
    from oled_jax.convert.inspection import as_text, inspect

    _stay_on_the_cpu()
    with open_checkpoint(arguments.source) as source:
        facts = inspect(source)
    print(json.dumps(facts, indent=1) if arguments.json else as_text(facts))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from oled_jax.checkpoint import open_checkpoint
    from oled_jax.convert.comparison import compare
    from oled_jax.convert.inspection import inspect

    _stay_on_the_cpu()
    line = ProgressLine("comparing")
    try:
        with open_checkpoint(arguments.a) as a, open_checkpoint(arguments.b) as b:
            differences = compare(a, b, line)
            tensors = inspect(a)["tensors"]
    finally:
        line.close()
    for difference in differences:
        print(difference)
    number = counted(len(differences), "difference")
    print(number if differences else f"equal: config and {counted(tensors, 'tensor')}")
    return EXIT_DIFFERENT if differences else 0


def _stay_on_the_cpu() -> None:
    """Orbax asks jax which process it is, and that starts a backend."""
    import jax

    jax.config.update("jax_platforms", "cpu")
