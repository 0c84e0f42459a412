"""Writes held-out tasks as a prompts file, for ``oled-jax generate`` and ``oled-jax trace``.

    python experiments/train/prompts.py FILE.jsonl --tasks copy,add --count 20

Promises: the same tasks, count and seed give the same file. Beside ``prompt`` and ``id`` a line has what a trace says
of its sequences: ``task``, and ``split``, which is "calibration" or "evaluation" and depends on the task alone.

Deliberately not here: answers. ``tasks.held_out`` with the same seed gives them in the same order.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks import KINDS, held_out, kind_named

from oled_jax.cli.running import Parser
from oled_jax.errors import OledError
from oled_jax.files import write_whole


def write_prompts(path: Path, tasks: Sequence[str], count: int, seed: int) -> int:
    """Writes ``count`` held-out prompts of each task, one JSON object a line, and returns the number of lines.

    Raises OledError for an unknown task, one with fewer prompts, and a file that cannot be written.
    """
    lines = []
    for task in tasks:
        split = "calibration" if kind_named(task).calibration else "evaluation"
        for number, example in enumerate(held_out(task, count, seed)):
            line = {"prompt": example.prompt, "id": f"{task}-{number:04d}", "task": task, "split": split}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    try:
        write_whole(path, "".join(lines))
    except OSError as error:
        raise OledError(f"{path} cannot be written: {error.strerror}") from None
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 after a mistake told in one line."""
    parser = Parser(prog="prompts", description="Writes held-out tasks as a prompts file (JSON lines).")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tasks", default=",".join(KINDS), help="names with commas between (default: all)")
    parser.add_argument("--count", type=int, default=20, help="prompts of each task (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which of the held-out prompts (default %(default)s)")
    try:
        args = parser.parse_args(arguments)
        if args.count < 1:
            raise OledError(f"--count is {args.count}: give 1 or more")
        lines = write_prompts(args.file, args.tasks.split(","), args.count, args.seed)
    except OledError as error:
        print(f"prompts: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.file}: {lines} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
