"""The command ``oled-jax``: its subcommands. How one runs and ends is ``oled_jax.cli.running``.

Each subcommand is a module here, named in ``COMMANDS``, with ``add_parser(subparsers)`` and ``run(args) -> int``. What
needs JAX or transformers is imported in ``run``, so that ``--help`` and ``--version`` answer at once.
"""

import importlib
from collections.abc import Sequence

from oled_jax.cli.running import Parser, command_parser, run_command

# In the order of the help.
COMMANDS = ("plan", "generate", "check", "trace", "replay")


def build_parser() -> Parser:
    """The parser of the whole command line; a parsed namespace carries its subcommand as ``run``."""
    parser, subparsers = command_parser("oled-jax", "LLaDA2.x block-diffusion language models in JAX.")
    for name in COMMANDS:
        importlib.import_module(f"oled_jax.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` and returns its exit code.

    Without ``argv`` it is the command line of the process, which is then owned and, after an interrupt, ended by it.
    """
    return run_command("oled-jax", build_parser, argv)
