"""Records the routing of a trained model over its held-out tasks: one file per block length, threshold and batch size.

    python experiments/train/traces.py --model demo --out traces [--core]

Files are named ``MODEL-bBLOCK-tTHRESHOLD-nBATCH.safetensors.gz``: blocks of 8, 16, 32 and 64 tokens at thresholds 0.9
and 0.95, one prompt at a time, and block 32 with four at a time. A file that is there is kept, so that an interrupted
call can be given again. ``--core`` records what the repository holds: block 32, threshold 0.9, eight prompts of each
task. Weights are stored in 8 bits. Every file says which of its sequences are for calibration and which for evaluation.

A model is trained at one block length (32). What it does at others is part of what is measured, not of what it learned.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from prompts import write_prompts
from tasks import KINDS

from oled_jax.arguments import integer
from oled_jax.assets import model_folder
from oled_jax.cli import main as oled_jax
from oled_jax.cli.running import Parser, run_command
from oled_jax.errors import OledError


class Setting(NamedTuple):
    """What one file is recorded under."""

    block: int
    threshold: float
    batch: int

    def file_name(self, model: str) -> str:
        """Where it goes."""
        return f"{model}-b{self.block}-t{round(100 * self.threshold)}-n{self.batch}.safetensors.gz"


CORE = (Setting(32, 0.9, 1),)
ALL = tuple(Setting(block, threshold, 1) for block in (8, 16, 32, 64) for threshold in (0.9, 0.95))
ALL += (Setting(32, 0.9, 4),)
CORE_PROMPTS, ALL_PROMPTS = 8, 20


def record(arguments: argparse.Namespace) -> int:
    """Records whatever is missing, and returns 0; OledError for the first file that fails (the recorder said why)."""
    integer("--count", arguments.count or 1, 1, 10**6)
    name = Path(arguments.model).resolve().name
    settings = CORE if arguments.core else ALL
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        tasks = arguments.tasks.split(",") if arguments.tasks else list(KINDS)
        count = arguments.count or (CORE_PROMPTS if arguments.core else ALL_PROMPTS)
        write_prompts(prompts, tasks, count, seed=arguments.seed)
        for setting in settings:
            out = arguments.out / setting.file_name(name)
            if out.exists():
                print(f"{out}: kept", flush=True)
                continue
            words = f"--weights uint8 --gen-length 128 --block-length {setting.block} --steps {setting.block} "
            words += f"--threshold {setting.threshold} --batch-size {setting.batch}"
            files = ("--model", arguments.model, "--prompts-file", prompts, "--out", out)
            if oled_jax(["trace", *map(str, files), *words.split()]):
                raise OledError(f"{out} was not recorded")
    return 0


def parser() -> Parser:
    """The command line; raises OledError where argparse would print its usage."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(command="traces", run=record)
    p.add_argument("--model", type=model_folder, required=True, metavar="FOLDER", help="checkpoint folder, or demo")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the files")
    p.add_argument("--core", action="store_true", help="only what the repository holds")
    p.add_argument("--tasks", metavar="NAME,NAME", help="only these tasks")
    p.add_argument("--count", type=int, metavar="N", help="prompts of each task (default: 20, or 8 with --core)")
    p.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for a user's mistake."""
    return run_command("traces", parser, argv)


if __name__ == "__main__":
    sys.exit(main())
