"""Where a retention policy learns: inside the jitted step, or in the manager on the host between steps.

    python experiments/bench_manager.py [--preset llada2.0-mini] [--policies lru,oled] [--misses 3] [--json FILE]

Steps and made-up routing are those of ``bench_step.py``, so that a policy that ranks by recency misses the stated
number of experts in every layer. Rows are interleaved, medians are reported; ``ratio`` is over the first row, and
``manager`` the time that the manager took of a step on the host, in milliseconds and as a share of the step.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from bench_step import CONTEXT, WARM, Stepper, made_up_routing
from random_engine import banked, geometry, random_weights

from oled_jax import Engine
from oled_jax.errors import OledError
from oled_jax.offload.budget import MANAGERS
from oled_jax.offload.offloaded import OffloadedExperts
from oled_jax.offload.scripted import ScriptedRouting
from oled_jax.retention import policy_by_name
from oled_jax.retention.manager import RetentionManager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llada2.0-mini")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--capacity", type=int, default=100)
    parser.add_argument("--wanted", type=int, default=70)
    parser.add_argument("--misses", type=int, default=3)
    parser.add_argument("--policies", default="lru,oled")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the figures into this file")
    args = parser.parse_args()

    config = geometry(args.preset, args.layers)
    model, experts = random_weights(config, jnp.dtype("bfloat16"))
    bank = banked(experts)
    del experts
    script = made_up_routing(config, args.wanted, (args.misses,))
    steppers = {}
    for name in args.policies.split(","):
        for manager in MANAGERS:
            runner = OffloadedExperts(
                config.num_experts, args.capacity, policy_by_name(name), observes=manager == "device"
            )
            shape = (len(config.moe_layers), config.num_experts, args.capacity)
            new = partial(RetentionManager, runner.policy, *shape) if manager == "host" else None
            scripted = ScriptedRouting(runner, script)
            engine = Engine(model, bank, context_length=CONTEXT, runner=scripted, new_manager=new)
            steppers[name, manager] = Stepper(engine, (args.misses,))
            steppers[name, manager].run()
            print(f"{name}, {manager}: warm", file=sys.stderr)

    times, spent = {key: [] for key in steppers}, {key: [] for key in steppers}
    for _ in range(args.repeats):
        for key, stepper in steppers.items():
            steps = stepper.run()
            times[key].append(statistics.median(step.ms for step in steps[WARM:]))
            spent[key].append(1e3 * stepper.engine.experts.metrics().manager_seconds / len(steps))
    first = statistics.median(next(iter(times.values())))
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {len(config.moe_layers)} MoE layers")
    print(f"{'policy':12s} {'learns on':9s} {'ms':>8s} {'(min..max)':>18s} {'ratio':>6s}   manager")
    figures = []
    for (name, manager), taken in times.items():
        median, mine = statistics.median(taken), statistics.median(spent[name, manager])
        spread = f"({min(taken):.3f}..{max(taken):.3f})"
        share = f"{mine:.3f} ms, {mine / median:.1%}" if manager == "host" else ""
        print(f"{name:12s} {manager:9s} {median:8.3f} {spread:>18s} {median / first:6.3f}   {share}")
        figures.append({"policy": name, "manager": manager, "ms": taken, "manager_ms": spent[name, manager]})
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    try:
        main()
    except OledError as error:
        sys.exit(f"bench_manager: error: {error}")
