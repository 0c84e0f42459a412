"""Many generations in one process under a budget: memory stays flat, nothing recompiles, counters add up.

    python experiments/soak.py --model PATH [--generations 1000] [--experts-on-device 40%] [--policy oled] [--form ...]

Prompts of random lengths, one to three at a time. Before that comes a warm-up with every number of prompts and every
length, in which all shapes are compiled. Ends with exit code 1 if anything compiled afterwards, if the counters of any
generation contradict each other, or if resident memory grew by more than 5 % since the warm-up.
"""

import argparse
import itertools
import json
import sys

import jax
import numpy as np

from oled_jax import Engine, Threshold
from oled_jax.errors import OledError
from oled_jax.metrics import ExpertMetrics
from oled_jax.progress import format_bytes

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
GROWTH = 0.05
LONGEST = 64  # exclusive


def resident_bytes() -> int:
    """Memory of this process that is resident now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def contradictions(metrics: ExpertMetrics) -> list[str]:
    """What cannot be true of one generation's counters."""
    found = []
    for phase in ("prefill", "decode"):
        traffic = getattr(metrics, phase)
        for layer, figures in enumerate(
            zip(traffic.requests, traffic.hits, traffic.loads, traffic.token_requests, traffic.token_hits, strict=True)
        ):
            requests, hits, loads, tokens, token_hits = figures
            if not (0 <= hits <= requests and loads == requests - hits and hits <= token_hits <= tokens):
                found.append(f"{phase}, layer {layer}: {figures}")
    found += [
        f"layer {i} holds {len(ids)}" for i, ids in enumerate(metrics.resident) if len(ids) > metrics.experts_on_device
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--experts-on-device", default="40%")
    parser.add_argument("--policy", default="oled")
    parser.add_argument("--form", default="load-then-compute")
    parser.add_argument("--manager", default="host")
    parser.add_argument("--mask-id", type=int)
    args = parser.parse_args()
    options = {"policy": args.policy, "form": args.form, "manager": args.manager, "context_length": 96}
    engine = Engine.load(args.model, experts_on_device=args.experts_on_device, **options)
    rule = Threshold(block_length=8, steps=8, threshold=0.5, mask_id=args.mask_id)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **kw: compiled.append(event) if event == COMPILE_EVENT else None
    )
    rng = np.random.default_rng(0)
    for batch, length in itertools.product((1, 2, 3), range(1, LONGEST)):
        engine.generate_batch([[1] * length] * batch, rule, gen_length=12, allow_special_ids=True)
    print(f"warm: {len(compiled)} compilations, {format_bytes(resident_bytes())} resident", file=sys.stderr)
    compiled.clear()
    problems, forwards, resident = [], 0, [(-1, resident_bytes())]
    for index in range(args.generations):
        prompts = [rng.integers(0, 250, rng.integers(1, LONGEST)).tolist() for _ in range(1 + index % 3)]
        outs = engine.generate_batch(prompts, rule, gen_length=int(rng.integers(1, 32)), allow_special_ids=True)
        problems += [f"generation {index}: {text}" for text in contradictions(outs[0].metrics.experts)]
        forwards += outs[0].metrics.experts.decode.forwards
        if index % max(1, args.generations // 20) == 0 or index == args.generations - 1:
            resident.append((index, resident_bytes()))
            print(f"{index + 1} of {args.generations}: {format_bytes(resident[-1][1])} resident", file=sys.stderr)
    first, last = resident[0][1], resident[-1][1]
    growth = last / first - 1
    figures = {
        "generations": args.generations,
        "decode_forwards": forwards,
        "compilations_after_warm_up": len(compiled),
        "contradictions": problems[:10],
        "resident_bytes": resident,
        "growth": growth,
    }
    print(json.dumps(figures))
    print(
        f"{args.generations} generations, {forwards} forwards; {len(compiled)} compilations after warm-up; "
        f"{len(problems)} contradictions; memory {format_bytes(first)} -> {format_bytes(last)} ({growth:+.1%})",
        file=sys.stderr,
    )
    return int(bool(compiled or problems or growth > GROWTH))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OledError as error:
        sys.exit(f"soak: error: {error}")
