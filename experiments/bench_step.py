"""A denoising step at LLaDA2.0-mini geometry: with and without a budget, by misses per layer; one table, one process.

    python experiments/bench_step.py [--preset llada2.0-mini] [--layers N] [--capacity 100] [--json FILE]

Random weights, one sequence, a block of 32 tokens, 1,024 committed positions. The routing is made up, so that under LRU
every step misses exactly the stated number of experts in every layer: about 70 experts are wanted, all but those were
wanted by the step before. A time is that of the whole step as a generation sees it: dispatch, everything on the device,
and the host's read of its report. Rows are interleaved, medians are reported, and the first row (all experts resident,
no machinery) is what the ratio refers to. ``ms per miss`` is per miss and layer, against the row without misses.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from random_engine import banked, geometry, random_weights

from oled_jax import Engine, ModelConfig, Threshold
from oled_jax.decoding.programs import Entry, Staged
from oled_jax.errors import OledError
from oled_jax.model.kv_cache import KVCache
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, STREAM, OffloadedExperts
from oled_jax.offload.resident import ResidentExperts
from oled_jax.offload.scripted import ScriptedRouting
from oled_jax.retention import policy_by_name

BLOCK, START, CONTEXT = 32, 992, 1024
MISSES = (0, 1, 3, 8, 16)
WARM, STEPS = 5, 12  # forwards of each segment: the first change over from the one before


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; ``counts``: misses per layer and forward that were really seen."""

    name: str
    misses: int
    counts: list[float]
    times: list[float]


def made_up_routing(config: ModelConfig, wanted: int, segments: tuple[int, ...]) -> np.ndarray:
    """Ids ``[F, L, T, K]``; within a segment of WARM + STEPS forwards, m of the wanted experts change every step."""
    rng = np.random.default_rng(0)
    layers, experts, chosen = len(config.moe_layers), config.num_experts, config.num_experts_per_tok
    length = WARM + STEPS
    script = np.empty((len(segments) * length, layers, BLOCK, chosen), np.int32)
    for layer in range(layers):
        order = rng.permutation(experts)
        for index, misses in enumerate(segments):
            steady, others = order[: wanted - misses], order[wanted - misses :]
            for step in range(length):
                fresh = others[(step * misses + np.arange(misses)) % len(others)]
                # Dealt out in turn: every one is chosen, and no token chooses one twice.
                dealt = np.resize(rng.permutation(np.concatenate([steady, fresh])), BLOCK * chosen)
                script[index * length + step, layer] = dealt.reshape(BLOCK, chosen)
    return script


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward in milliseconds: the whole of it, and until its program was dispatched; until the device was ready,
    if that was waited for; ``misses`` per layer."""

    ms: float
    misses: float
    dispatched: float
    ready: float | None


class Stepper:
    """Runs denoising forwards of one engine, outside any generation."""

    def __init__(self, engine: Engine, segments: tuple[int, ...]):
        self.engine, self.segments = engine, segments
        self.rule = Threshold(threshold=1.0, mask_id=0, eos_id=1)
        self.arguments = (self.rule.program(), self.rule.params(BLOCK, engine.config.vocab_size))

    def run(self, *, apart: bool = False) -> list[Step]:
        """One pass over all segments; ``apart``: waits for the device before it reads the report."""
        engine, experts = self.engine, self.engine.experts
        cache = KVCache.zeros(engine.config, 1, CONTEXT, engine.programs.dtype)
        staged = Staged.zeros(cache, BLOCK)
        numbers = experts.begin(1)
        rows = engine.programs.new_rows(*self.arguments, np.zeros(1, np.uint32), numbers)
        block = np.zeros((1, BLOCK), np.int32)
        yes = np.ones(1, bool)
        entry = Entry(yes, np.full(1, START, np.int32), block, block > 0, yes, yes)
        rows = engine.programs.enter(*self.arguments, rows, entry)
        outcome, began = [], None
        for _ in range(len(self.segments) * (WARM + STEPS)):
            began = began or time.perf_counter()
            step = engine.programs.denoise(*self.arguments, cache, staged, experts.state, rows, CONTEXT)
            vector, staged, experts.state, rows, _ = step
            dispatched, ready = time.perf_counter(), None
            if apart:
                jax.block_until_ready(rows)
                ready = 1e3 * (time.perf_counter() - began)
            record = experts.observe(vector, 1, BLOCK).record
            now = time.perf_counter()
            misses = np.mean(np.sum((record.counts > 0) & ~record.resident, axis=1))
            outcome.append(Step(1e3 * (now - began), float(misses), 1e3 * (dispatched - began), ready))
            began = now
        return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llada2.0-mini")
    parser.add_argument("--model", help="a checkpoint folder's config.json in place of a preset; weights stay random")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--capacity", type=int, default=100)
    parser.add_argument("--wanted", type=int, default=70)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--trace", help="write a profiler trace of one pass of each engine into this folder")
    parser.add_argument("--json", help="write the figures into this file")
    args = parser.parse_args()

    config = geometry(args.preset, args.layers, args.model)
    model, experts = random_weights(config, jnp.dtype(args.dtype))
    total = sum(array.nbytes for array in jax.tree.leaves(experts))
    print(f"experts: {total / 2**30:.1f} GiB", file=sys.stderr)
    bank = banked(experts)

    lru = policy_by_name("lru")
    everything, some = config.num_experts, args.capacity
    kinds = [
        ("resident", ResidentExperts(), experts, (0,)),
        (f"N = {everything}", OffloadedExperts(everything, everything, lru), bank, (0,)),
        *[
            (f"{form}, N = {some}", OffloadedExperts(everything, some, lru, form=form), bank, MISSES)
            for form in (LOAD_THEN_COMPUTE, STREAM)
        ],
    ]
    steppers = {}
    for name, runner, weights, segments in kinds:
        scripted = ScriptedRouting(runner, made_up_routing(config, args.wanted, segments))
        engine = Engine(model, weights, context_length=CONTEXT, runner=scripted)
        steppers[name] = Stepper(engine, segments)
        began = time.perf_counter()
        steppers[name].run()
        seconds = engine.programs.compile_seconds
        print(
            f"{name}: warm after {time.perf_counter() - began:.1f} s, {seconds:.1f} s of it compiling", file=sys.stderr
        )

    rows = [Row(name, misses, [], []) for name, _, _, segments in kinds for misses in segments]
    for _ in range(args.repeats):
        for name, stepper in steppers.items():
            outcome = stepper.run()
            for index, misses in enumerate(stepper.segments):
                row = next(row for row in rows if (row.name, row.misses) == (name, misses))
                end = (index + 1) * (WARM + STEPS)
                row.times.append(statistics.median(step.ms for step in outcome[end - STEPS : end]))
                row.counts.append(statistics.mean(step.misses for step in outcome[end - STEPS : end]))
    if args.trace:
        for name, stepper in steppers.items():
            with jax.profiler.trace(str(Path(args.trace) / name.replace(" ", ""))):
                stepper.run()
    print_table(rows, len(config.moe_layers))
    if args.json:
        Path(args.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def print_table(rows: list[Row], layers: int) -> None:
    """The table, with the misses that were really counted."""
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {layers} MoE layers, block {BLOCK}")
    print(f"{'':30s} misses  counted       ms  (min..max)           ratio  ms per miss")
    base, zero = statistics.median(rows[0].times), {}
    for row in rows:
        median, low, high = statistics.median(row.times), min(row.times), max(row.times)
        zero.setdefault(row.name, median)
        each = f"{(median - zero[row.name]) / row.misses / layers:11.3f}" if row.misses else ""
        figures = f"{median:8.3f}  ({low:.3f}..{high:.3f})  {median / base:6.3f}"
        print(f"{row.name:30s} {row.misses:6d}  {statistics.mean(row.counts):7.2f} {figures}  {each}")


if __name__ == "__main__":
    try:
        main()
    except OledError as error:
        sys.exit(f"bench_step: error: {error}")
