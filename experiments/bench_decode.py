"""Time of a denoising step by prefix length, and the number of compilations after warm-up.

    python experiments/bench_decode.py --preset llada2.0-mini              # random weights made on the device
    python experiments/bench_decode.py --model PATH --prefixes 256,2048

Every figure comes from one process: each prefix is run ``--repeats`` times, interleaved, and the median of the
milliseconds per forward is reported beside its ratio to the shortest prefix. Compilations are counted by JAX's own
monitoring events, not assumed. ``--json FILE`` keeps the numbers.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from random_engine import geometry, random_weights

from oled_jax import Engine, Threshold
from oled_jax.errors import OledError

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a checkpoint folder")
    source.add_argument("--preset", help="a preset, with random weights")
    parser.add_argument("--layers", type=int, help="with --preset: fewer layers")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prefixes", default="256,2048", help="prompt lengths, comma-separated")
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trace", help="write a profiler trace of one generation into this folder")
    parser.add_argument("--json", help="write the figures into this file")
    args = parser.parse_args()

    prefixes = [int(p) for p in args.prefixes.split(",")]
    context = max(prefixes) + args.gen_length
    if args.preset:
        config = geometry(args.preset, args.layers)
        engine = Engine(*random_weights(config, jnp.dtype(args.dtype)), context_length=context)
    else:
        engine = Engine.load(args.model, dtype=args.dtype, context_length=context)
    # A threshold that nothing exceeds: every block takes its 32 forwards, whatever the weights.
    rule = Threshold(threshold=1.0)
    rng = np.random.default_rng(0)
    prompts = {p: rng.integers(0, min(1000, engine.config.vocab_size), p).tolist() for p in prefixes}

    def run(prefix: int):
        return engine.generate(prompts[prefix], rule, gen_length=args.gen_length).metrics

    warm = {prefix: run(prefix) for prefix in prefixes}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **kw: compiled.append(event) if event == COMPILE_EVENT else None
    )
    times: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    prefill: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    for _ in range(args.repeats):
        for prefix in prefixes:
            metrics = run(prefix)
            times[prefix].append(metrics.ms_per_forward)
            prefill[prefix].append(metrics.prefill_seconds)
    if args.trace:
        with jax.profiler.trace(args.trace):
            run(prefixes[0])

    medians = {prefix: statistics.median(times[prefix]) for prefix in prefixes}
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}")
    print(
        f"compile, warm-up: {sum(m.compile_seconds for m in warm.values()):.1f} s, {engine.programs.compiled} programs"
    )
    print(f"compilations after warm-up: {len(compiled)}")
    print("prefix  ms/forward (min..max)   ratio  prefill s")
    for prefix in prefixes:
        low, high = min(times[prefix]), max(times[prefix])
        ratio = medians[prefix] / medians[prefixes[0]]
        filled = statistics.median(prefill[prefix])
        print(f"{prefix:6d}  {medians[prefix]:8.3f} ({low:.3f}..{high:.3f})  {ratio:5.3f}  {filled:.4f}")
    if args.json:
        figures = {"ms_per_forward": times, "prefill_seconds": prefill, "compilations_after_warm_up": len(compiled)}
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    try:
        main()
    except OledError as error:
        sys.exit(f"bench_decode: error: {error}")
