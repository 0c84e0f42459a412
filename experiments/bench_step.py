"""The expert part of a denoising step at LLaDA2.0-mini geometry: with and without a budget, by misses per layer.

    python experiments/bench_step.py [--layers 19] [--repeats 5] [--json FILE]

One process, one table. 19 MoE layers with 256 experts of 2048 x 512 (random, bfloat16), 32 tokens, 8 experts each;
routing is made up so that under LRU every step misses exactly the stated number of experts in every layer: about 70
experts are wanted, all but those were wanted by the step before. Rows are interleaved, medians are reported, and the
first row (all experts resident, no machinery) is what the ratio column refers to.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.model.experts import ExpertWeights
from oled_jax.offload.offloaded import OffloadedExperts
from oled_jax.offload.resident import ResidentExperts

EXPERTS, HIDDEN, WIDTH, TOKENS, CHOSEN, WANTED = 256, 2048, 512, 32, 8, 70
STEPS = 8


def routing(layers: int, misses: int, steps: int) -> np.ndarray:
    """Ids ``[steps, layers, T, K]`` of which each step's last ``misses`` experts rotate through the unused ones."""
    rng = np.random.default_rng(0)
    stream = np.empty((steps, layers, TOKENS, CHOSEN), np.int32)
    for layer in range(layers):
        order = rng.permutation(EXPERTS)
        steady, others = order[: WANTED - misses], order[WANTED - misses :]
        for step in range(steps):
            fresh = others[(step * misses + np.arange(misses)) % len(others)]
            wanted = rng.permutation(np.concatenate([steady, fresh]))
            # Deal the wanted experts out in turn: every one is chosen, and no token chooses one twice.
            stream[step, layer] = np.resize(wanted, TOKENS * CHOSEN).reshape(TOKENS, CHOSEN)
    return stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--capacity", type=int, default=100)
    parser.add_argument("--json", help="write the figures into this file")
    args = parser.parse_args()

    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    @partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

    device, bank = {}, {}
    for layer in range(args.layers):
        keys = jax.random.split(jax.random.key(layer))
        gate_up = normal(keys[0], (EXPERTS, 2 * WIDTH, HIDDEN))
        device[layer] = ExpertWeights(gate_up, normal(keys[1], (EXPERTS, WIDTH, HIDDEN)))
        bank[layer] = jax.block_until_ready(jax.device_put(device[layer], pinned))
    x = normal(jax.random.key(99), (TOKENS, HIDDEN)) * 50
    weights = jnp.full((TOKENS, CHOSEN), 0.3, jnp.float32)

    rows = [("resident", ResidentExperts(), device, 0), ("N = 256", OffloadedExperts(EXPERTS, EXPERTS), bank, 0)]
    for form, mode in (("load-then-compute", "protect"), ("stream", "select")):
        runner = OffloadedExperts(EXPERTS, args.capacity, form=form, mode=mode)
        rows += [(f"{form}, N = {args.capacity}", runner, bank, misses) for misses in (0, 1, 3, 8, 16)]

    compiled, times, loads = {}, {i: [] for i in range(len(rows))}, {}
    for repeat in range(args.repeats + 1):
        for index, (name, runner, weights_of, misses) in enumerate(rows):
            if (runner, name) not in compiled:
                store, _ = runner.init(weights_of)

                @partial(jax.jit, donate_argnums=1)
                def step(store, state, x, ids, runner=runner):
                    loaded = jnp.int32(0)
                    for layer in range(args.layers):
                        y, state, telemetry = runner.run(store, state, layer, x, ids[layer], weights)
                        x = (x.astype(jnp.float32) + 0.01 * y.astype(jnp.float32)).astype(jnp.bfloat16)
                        loaded += 0 if telemetry is None else telemetry.loads
                    return x, state, loaded

                compiled[runner, name] = (store, step)
            store, step = compiled[runner, name]
            _, state = runner.init(weights_of)
            warm = 4 if misses else 3
            stream = [jnp.asarray(ids) for ids in routing(args.layers, misses, warm + STEPS)]
            for ids in stream[:warm]:
                out, state, loaded = step(store, state, x, ids)
            jax.block_until_ready(out)
            began, counted = time.perf_counter(), []
            for ids in stream[warm:]:
                out, state, loaded = step(store, state, x, ids)
                counted.append(loaded)
            jax.block_until_ready(out)
            if repeat:
                times[index].append((time.perf_counter() - began) / STEPS * 1e3)
            loads[index] = [int(count) for count in counted]
            del state

    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.layers} layers")
    print(f"{'':32s} misses  loads/step      ms  (min..max)         ratio  ms per miss and layer")
    base = statistics.median(times[0])
    zero: dict[str, float] = {}
    for index, (name, _, _, misses) in enumerate(rows):
        median, low, high = statistics.median(times[index]), min(times[index]), max(times[index])
        zero.setdefault(name, median)
        each = f"{(median - zero[name]) / misses / args.layers:.3f}" if misses else ""
        figures = f"{median:7.3f}  ({low:.3f}..{high:.3f})  {median / base:6.3f}"
        print(f"{name:32s} {misses:6d}  {np.mean(loads[index]):10.1f}  {figures}  {each}")
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": [r[0::3] for r in rows], "ms": times, "loads": loads}, indent=1))


if __name__ == "__main__":
    main()
