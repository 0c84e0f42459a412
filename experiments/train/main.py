"""Trains one of the presets, and exports it as a checkpoint folder that the engine loads.

    python experiments/train/main.py --model demo --out DIR --minutes 9 [--resume]

DIR holds the run (``saving``), the tokenizer, the log (log.jsonl, a report a line), compiled programs, and after each
call ``model/``, the checkpoint. A run ends after the recipe's steps; a call ends there or when its minutes are over,
which count from its start and include compiling, saving and exporting. ``--resume`` goes on where the last call
stopped, and gives the weights that an uninterrupted run gives, on one machine and with the compiled programs in DIR.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from batches import KIND_NAMES, Batch, BatchConfig, BatchMaker, Curriculum, Mix
from export import export
from loop import Report, report_of, run_steps
from objective import no_sums
from prefetch import Prefetcher
from presets import BLOCK, LENGTH, PRESETS, Preset
from profiling import profile
from saving import open_run, restore, save
from training import TrainState, abstract_state, count, initial_state, jitted_evaluation, jitted_step, weight_shapes
from vocabulary import ENDOFTEXT, MASK, SPECIAL_IDS, write_tokenizer

from oled_jax.arguments import integer
from oled_jax.cli.running import Parser
from oled_jax.errors import OledError
from oled_jax.progress import format_bytes

HELD_OUT_BATCHES = 4
LAST_STEP = 10**9  # when every curriculum has ended
EVALUATE_EVERY = 5  # reports
SAVE_SECONDS = 180  # what a killed call loses at most
WARM_STEPS = 5  # before a profile

_OVERRIDES = (
    ("--steps", int, "steps", "steps of the whole run, at the end of which the learning rate is zero"),
    ("--batch", int, "batch", "rows of a step"),
    ("--peak-rate", float, "peak_rate", "highest learning rate"),
    ("--sharpening", float, "sharpening", "weight of the entropy of right predictions, late in the run"),
    ("--experts", str, "experts", "dense or gathered"),
    ("--capacity", float, "capacity", "of gathered experts, in even shares"),
    ("--embedding", str, "embedding", "gradient of the token table: matmul or scatter"),
)


def with_overrides(name: str, arguments: argparse.Namespace) -> Preset:
    """The preset with the recipe that the command line asks for, and the tokenizer's special ids."""
    if name not in PRESETS:
        raise OledError(f"unknown model {name!r}: the models are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    given = {field: getattr(arguments, field) for _, _, field, _ in _OVERRIDES}
    recipe = dataclasses.replace(preset.recipe, **{field: value for field, value in given.items() if value is not None})
    end = SPECIAL_IDS[ENDOFTEXT]
    ids = {"pad_token_id": end, "eos_token_id": end, "mask_token_id": SPECIAL_IDS[MASK]}
    return dataclasses.replace(preset, config=dataclasses.replace(preset.config, **ids), recipe=recipe)


def batch_config(preset: Preset, arguments: argparse.Namespace) -> BatchConfig:
    """What the batches are made of."""
    mix = Mix()
    if arguments.tasks:
        mix = dataclasses.replace(mix, tasks=tuple((name, 1.0) for name in arguments.tasks.split(",")))
    if arguments.text is not None:
        mix = dataclasses.replace(mix, text=arguments.text)
    curriculum = Curriculum()
    if arguments.curriculum is not None:
        curriculum = dataclasses.replace(curriculum, steps=arguments.curriculum)
    shape = {"rows": preset.recipe.batch, "length": LENGTH, "block_length": BLOCK}
    return BatchConfig(tokenizer=str(arguments.out / "tokenizer"), mix=mix, curriculum=curriculum, **shape)


def settings_of(preset: Preset, data: BatchConfig, seed: int) -> dict:
    """What makes a run the run it is."""
    return {
        "model": preset.name,
        "seed": seed,
        "config": preset.config.to_hf(),
        "recipe": dataclasses.asdict(preset.recipe),
        "data": {**dataclasses.asdict(data), "tokenizer": "tokenizer"},
    }


def train(arguments: argparse.Namespace, began: float) -> None:
    """Runs one call; raises OledError for a user's mistake."""
    out = arguments.out
    integer("seed", arguments.seed, 0, 2**32 - 1)
    integer("every", arguments.every, 1, 10**9)
    preset = with_overrides(arguments.model, arguments)
    data = batch_config(preset, arguments)
    open_run(out, settings_of(preset, data, arguments.seed), arguments.resume)
    if not (out / "tokenizer").exists():
        write_tokenizer(out / "tokenizer.partial", size=preset.config.vocab_size)
        (out / "tokenizer.partial").rename(out / "tokenizer")
    jax.config.update("jax_compilation_cache_dir", str((out / "compiled").absolute()))
    state = restore(out, abstract_state(preset)) or initial_state(preset, arguments.seed)
    first = int(state.step)
    numbers = count(weight_shapes(preset.config)) + state.bias.size
    print(
        f"{preset.name}: {numbers:,} parameters, {jax.devices()[0].device_kind}, jax {jax.__version__}; step {first:,} "
        f"of {preset.recipe.steps:,}, {2 * LENGTH * preset.recipe.batch:,} positions a step",
        flush=True,
    )
    held_out = BatchMaker(dataclasses.replace(data, split="held-out"))
    held_out = [held_out(arguments.seed, LAST_STEP + index) for index in range(HELD_OUT_BATCHES)]
    # The workers read their texts while this process compiles.
    with Prefetcher(data, seed=arguments.seed, first_step=first, workers=arguments.workers) as batches:
        programs = compiled_programs(preset, state, held_out[0])
        if arguments.profile:
            profiled(arguments, preset, programs.step, state, iter(batches))
            return
        state = run_steps(
            programs.step,
            preset,
            KIND_NAMES,
            state,
            batches,
            arguments.seed,
            every=arguments.every,
            out_of_time=lambda: time.monotonic() > began + 60 * arguments.minutes - arguments.reserve,
            on_report=Reporter(arguments, preset, programs.evaluate, held_out),
        )
    save(out, state)
    weights, bias = jax.device_get((state.weights, state.bias))
    size = export(out / "model", preset.config, weights, bias, out / "tokenizer")
    left = preset.recipe.steps - int(state.step)
    print(
        f"{out / 'model'}: {format_bytes(size)} after step {int(state.step):,}, "
        f"{f'{left:,} to go (--resume)' if left else 'complete'}, {time.monotonic() - began:.0f} s in all"
    )


class Programs(NamedTuple):
    """The compiled ``training.jitted_step`` and ``jitted_evaluation``."""

    step: jax.stages.Compiled
    evaluate: jax.stages.Compiled


def compiled_programs(preset: Preset, state: TrainState, batch: Batch) -> Programs:
    """Compiles both for batches like ``batch``, and says how long that took."""
    began, kinds = time.perf_counter(), len(KIND_NAMES)
    step = jitted_step(preset, kinds).lower(state, no_sums(preset.config, kinds), batch, np.uint32(0)).compile()
    evaluate = jitted_evaluation(preset, kinds).lower(state, batch, np.uint32(0)).compile()
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    return Programs(step, evaluate)


class Reporter:
    """Prints and logs reports, adds a held-out one to some of them, and saves the state now and then."""

    def __init__(self, arguments: argparse.Namespace, preset: Preset, evaluate: Callable, held_out: list[Batch]):
        self._arguments, self._preset, self._evaluate, self._held_out = arguments, preset, evaluate, held_out
        self._saved = time.monotonic()

    def __call__(self, report: Report, state: TrainState) -> None:
        print(report.line(), flush=True)
        entry = dataclasses.asdict(report)
        if report.step % (self._arguments.every * EVALUATE_EVERY) == 0 or report.step == self._preset.recipe.steps:
            held_out = self._evaluated(state, report.step)
            entry["held_out"] = {"accuracy": held_out.accuracy, "by_kind": held_out.by_kind}
            print(f"  held out: {held_out.accuracy_text()}", flush=True)
            print(f"  expert load by layer, in even shares: {report.load_text()}", flush=True)
        with (self._arguments.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        if time.monotonic() - self._saved > SAVE_SECONDS:
            save(self._arguments.out, state)
            self._saved = time.monotonic()

    def _evaluated(self, state: TrainState, step: int) -> Report:
        """Under fixed noise; its rates of time mean nothing."""
        sums = [self._evaluate(state, batch, np.uint32(index)) for index, batch in enumerate(self._held_out)]
        total = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(sums))
        return report_of(self._preset, KIND_NAMES, step, total, 1.0)


def profiled(arguments: argparse.Namespace, preset: Preset, compiled, state: TrainState, batches) -> None:
    """Traces ``arguments.profile`` steps and prints where their time went; nothing is saved."""
    sums = no_sums(preset.config, len(KIND_NAMES))
    made = [next(batches)[1] for _ in range(WARM_STEPS + arguments.profile)]
    seed = np.uint32(arguments.seed)
    for batch in made[:WARM_STEPS]:
        state, sums, _ = compiled(state, sums, batch, seed)
    jax.block_until_ready(state)

    def run() -> None:
        nonlocal state, sums
        for batch in made[WARM_STEPS:]:
            state, sums, _ = compiled(state, sums, batch, seed)
        jax.block_until_ready(state)

    shutil.rmtree(arguments.out / "profile", ignore_errors=True)
    table = profile(arguments.out / "profile", compiled, arguments.profile, run)
    (arguments.out / "profile.txt").write_text(table + "\n")
    print(table, flush=True)


def parser() -> Parser:
    """The command line; raises OledError where argparse would print its usage."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help=", ".join(PRESETS))
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    p.add_argument("--minutes", type=float, default=9.0, help="of this call, all included (default: %(default)s)")
    p.add_argument(
        "--reserve", type=float, default=30.0, metavar="SECONDS", help="of these, kept for saving and export"
    )
    p.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--every", type=int, default=100, metavar="STEPS", help="between reports (default: %(default)s)")
    p.add_argument("--workers", type=int, default=8, help="processes that make batches (default: %(default)s)")
    p.add_argument("--tasks", metavar="NAME,NAME", help="only these tasks, equally often")
    p.add_argument("--text", type=float, metavar="SHARE", help="share of free text among the examples")
    p.add_argument("--curriculum", type=int, metavar="STEPS", help="until the tasks have their full size")
    p.add_argument("--profile", type=int, metavar="STEPS", help="trace so many steps, print a table and stop")
    for option, kind, field, text in _OVERRIDES:
        p.add_argument(option, dest=field, type=kind, help=f"{text}; default: the preset's")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for a user's mistake."""
    began = time.monotonic()
    try:
        arguments = parser().parse_args(argv)
        train(arguments, began)
    except OledError as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train: error: {error.filename or arguments.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
