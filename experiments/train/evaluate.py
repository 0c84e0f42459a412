"""How well a trained checkpoint does its tasks, through the engine: exact match, tokens per forward, expert load.

    python experiments/train/evaluate.py --model FOLDER --per-task N [--json FILE] [--compare]

Held-out examples of every task are decoded greedily at threshold 0.9 by ``Engine.generate_batch``. Tokens per forward
counts an answer up to its end, ``positions_per_forward`` all that decoding filled, to the end of the last block: a
short answer takes few forwards and is mostly fill. ``--compare`` decodes again in float32 with all, 40 % and 10 % of
the experts on the device, and says how many answers are equal, token by token; and how many bfloat16 gives too.
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path

import numpy as np
from routing import load_report
from tasks import KINDS, Example, grade, held_out

from oled_jax import Engine, Threshold
from oled_jax.assets import model_folder
from oled_jax.cli.running import Parser, run_command
from oled_jax.decoding.loop import Generation
from oled_jax.errors import OledError
from oled_jax.files import write_whole
from oled_jax.tokenizer import decode, encode_chat

BLOCK = 32
SHARES = (None, "40%", "10%")


class Load:
    """Adds up how many tokens each expert got, forward by forward; ``tokens`` int64 ``[L, E]``."""

    def __init__(self, layers: int, experts: int):
        self.tokens = np.zeros((layers, experts), np.int64)

    def __call__(self, record) -> None:
        self.tokens += record.counts


def examples_of(tasks: list[str], per_task: int, seed: int, level: float) -> list[Example]:
    """``per_task`` held-out examples of each task, interleaved, so that batches are mixed."""
    by_task = [held_out(task, per_task, seed, level) for task in tasks]
    return [example for row in zip(*by_task, strict=True) for example in row]


def generate_all(
    engine: Engine, examples: list[Example], rule: Threshold, gen_length: int, batch: int, on_record=None
) -> list[Generation]:
    """Answers to all ``examples``, ``batch`` at a time."""
    prompts = [encode_chat(engine.tokenizer, example.prompt) for example in examples]
    answers = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        answers += engine.generate_batch(part, rule, gen_length=gen_length, on_record=on_record)
    return answers


def scores(engine: Engine, examples: list[Example], answers: list[Generation]) -> dict:
    """Exact match and tokens per forward, of each task and of all; up to three failures of each task."""
    groups, failures = collections.defaultdict(list), collections.defaultdict(list)
    for example, answer in zip(examples, answers, strict=True):
        text = decode(engine.tokenizer, answer.tokens)
        right = grade(example, text)
        filled = answer.metrics.num_blocks * BLOCK - answer.metrics.prompt_tokens % BLOCK
        groups[example.task].append((right, len(answer.tokens), filled, answer.num_forwards))
        if not right and len(failures[example.task]) < 3:
            failures[example.task].append({"prompt": example.prompt, "expected": example.answer, "got": text})
    everything = [row for rows in groups.values() for row in rows]
    table = {task: _rates(rows) for task, rows in groups.items()}
    return {"all": _rates(everything), "tasks": table, "failures": dict(failures)}


def _rates(rows: list[tuple[bool, int, int, int]]) -> dict[str, float]:
    right, tokens, filled, forwards = (sum(column) for column in zip(*rows, strict=True))
    rates = {
        "exact_match": right / len(rows),
        "tokens_per_forward": tokens / forwards,
        "positions_per_forward": filled / forwards,
    }
    return {"examples": len(rows), **{name: round(rate, 4) for name, rate in rates.items()}}


def evaluate(arguments: argparse.Namespace) -> dict:
    """Everything that the command prints, ready for JSON."""
    tasks = arguments.tasks.split(",") if arguments.tasks else list(KINDS)
    if unknown := [task for task in tasks if task not in KINDS]:
        raise OledError(f"unknown task {unknown[0]!r}: the tasks are {', '.join(KINDS)}")
    if arguments.per_task < 1 or arguments.batch < 1:
        raise OledError("--per-task and --batch take numbers of at least 1")
    examples = examples_of(tasks, arguments.per_task, arguments.seed, arguments.level)
    rule = Threshold(
        threshold=arguments.threshold, block_length=BLOCK, steps=BLOCK, eos_early_stop=arguments.eos_early_stop
    )
    run = (examples, rule, arguments.gen_length, arguments.batch)

    began = time.monotonic()
    engine = Engine.load(arguments.model, dtype=arguments.dtype)
    load = Load(len(engine.config.moe_layers), engine.config.num_experts)
    answers = generate_all(engine, *run, on_record=load)
    result = {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "threshold": arguments.threshold,
        **scores(engine, examples, answers),
        "expert_load": load_report(load.tokens.astype(np.float64)),
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.compare:
        result["comparison"] = compared(arguments, run)
    return result


def compared(arguments: argparse.Namespace, run: tuple) -> dict:
    """Share of answers equal to those of full residency in float32, by the share of experts on the device."""
    reference, equal = None, {}
    for share, dtype in [*((share, "float32") for share in SHARES), (None, "bfloat16")]:
        engine = Engine.load(arguments.model, dtype=dtype, experts_on_device=share)
        tokens = [answer.tokens for answer in generate_all(engine, *run)]
        reference = reference or tokens
        name = f"{dtype}, {share or '100%'} of the experts"
        equal[name] = sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(tokens)
    return equal


def parser() -> Parser:
    """The command line; raises OledError where argparse would print its usage."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(command="evaluate", run=run)
    p.add_argument("--model", type=model_folder, required=True, metavar="FOLDER", help="checkpoint folder, or demo")
    p.add_argument("--per-task", type=int, default=50, metavar="N", help="examples of each task (default: %(default)s)")
    p.add_argument("--tasks", metavar="NAME,NAME", help="only these tasks")
    p.add_argument("--threshold", type=float, default=0.9, help="default: %(default)s")
    p.add_argument("--eos-early-stop", action="store_true", help="stop at an end of text, not at the end of its block")
    p.add_argument("--gen-length", type=int, default=128, metavar="TOKENS", help="default: %(default)s")
    p.add_argument("--batch", type=int, default=16, help="prompts decoded together (default: %(default)s)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of the examples (default: %(default)s)")
    p.add_argument("--level", type=float, default=1.0, help="size of the tasks, 0 to 1 (default: %(default)s)")
    p.add_argument("--compare", action="store_true", help="also with 40 %% and 10 %% of the experts, and in bfloat16")
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything there, failures too")
    return p


def table(result: dict) -> str:
    """The result for people; failures and the load of every layer are in the JSON alone."""
    lines = [f"{'task':12s} {'examples':>8s} {'exact match':>12s} {'tokens/forward':>15s}"]
    for name, rates in {**result["tasks"], "all": result["all"]}.items():
        figures = f"{rates['examples']:8d} {rates['exact_match']:12.3f} {rates['tokens_per_forward']:15.2f}"
        lines.append(f"{name:12s} {figures}")
    load = result["expert_load"]
    least, dead = min(load["min"]), sum(load["dead"])
    lines += ["", f"least used expert of any layer: {least:.2f} of an even share; below a tenth: {dead}"]
    for setting, share in result.get("comparison", {}).items():
        lines.append(f"answers equal to those of all experts in float32: {share:7.2%}  {setting}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Prints the result, and writes it as JSON if that is asked for."""
    result = evaluate(arguments)
    if arguments.json:
        write_whole(arguments.json, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for a user's mistake."""
    return run_command("evaluate", parser, argv)


if __name__ == "__main__":
    sys.exit(main())
