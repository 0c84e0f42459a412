"""The command ``oled-jax``: its subcommands, and what a user sees when something is wrong.

Promises: a user's mistake is one line ``oled-jax: error: ...`` on standard error and exit code 2, whether the argument
parser, a file or the engine found it; an interrupt is one line and exit code 130; a reader that closes the pipe ends
the command quietly. Results go to standard output, everything said about them to standard error. A traceback means a
defect of this package.

Each subcommand is a module here with ``add_parser(subparsers)`` and ``run(args) -> int``. What needs JAX or
transformers is imported in ``run``, so that ``--help`` and ``--version`` answer at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from oled_jax.cli import generate
from oled_jax.errors import OledError
from oled_jax.version import __version__

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + 2  # what a shell reports for a command that SIGINT ended
EXIT_BROKEN_PIPE = 128 + 13  # the same for SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that there is one place that reports mistakes."""

    def error(self, message: str) -> NoReturn:
        raise OledError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; a parsed namespace carries its subcommand as ``run``."""
    parser = _Parser(
        prog="oled-jax",
        description="LLaDA2.x block-diffusion language models in JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"oled-jax {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    generate.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: that of the process) and returns its exit code.

    ``--help`` and ``--version`` leave through SystemExit, as argparse does.
    """
    try:
        try:
            args = build_parser().parse_args(argv)
            return args.run(args)
        finally:
            sys.stdout.flush()  # a closed pipe shows here and not when the interpreter ends
    except OledError as error:
        print(f"oled-jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        # A terminal's cursor may stand inside a line that was being redrawn.
        start = "\n" if sys.stdout.isatty() or sys.stderr.isatty() else ""
        print(f"{start}oled-jax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
