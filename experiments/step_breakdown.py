"""Where a denoising step's time goes, from a profile, with the bytes that each part must move beside it.

    python experiments/step_breakdown.py [--preset llada2.0-mini] [--capacity 100] [--misses 3] [--json FILE]

The step and its made-up routing are those of ``bench_step.py``. A profile of some steps says how long each operation
ran on the device; the compiled program says which part of the model it belongs to (its named scope). Command buffers
are off while profiling, because inside one a kernel does not tell its name; the whole step is timed with them, too.
``ideal`` is a part's bytes over the bandwidth measured in this process (device: a copy of 2 GB; link: the experts of a
layer out of pinned host memory); what takes more than 1.5 times its ideal is marked. The slot pass reads all N + G
rows, so its ideal does as well; the bytes of the experts that tokens want stand in a line of their own.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
# The innermost of these scopes is an operation's part; whatever stands under none of them is "other".
PARTS = (
    "attention",
    "router",
    "placement",
    "loads",
    "products",
    "experts",
    "shared_experts",
    "lm_head",
    "decoding_rule",
    "retention",
)
MEANING = {
    "placement": "who is loaded into which row",
    "loads": "link",
    "products": "slot pass",
    "experts": "gather, combine, loop predicates",
    "decoding_rule": "sampling",
    "retention": "record and policy",
    "other": "embedding, norms, dense layer, report",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One line: milliseconds per step on the device, launches per step, bytes it must move, over which wire."""

    name: str
    ms: float
    launches: float
    megabytes: float = 0.0
    ideal_ms: float = 0.0


def parts_of(text: str) -> dict[str, str]:
    """Operation name to part, from a program's optimised HLO.

    An asynchronous operation shows in a profile under the name of the computation that it runs, so those are in, too.
    """
    found, computations, within = {}, {}, None
    for line in text.splitlines():
        heading = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*{$", line)
        name = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
        if heading:
            within = heading.group(1)
        elif name:
            scope = re.search(r'op_name="([^"]*)"', line)
            pieces = [piece for piece in re.split(r"[/()]", scope.group(1)) if piece in PARTS] if scope else []
            found[name.group(1)] = pieces[-1] if pieces else "other"
            if pieces:
                computations[within] = pieces[-1]
    return computations | found


def device_events(folder: str) -> list[tuple[str, float]]:
    """(operation, nanoseconds) of everything that ran on the device; on a CPU, of what XLA's threads ran."""
    import jax

    (path,) = Path(folder).rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    events = []
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # the same events again, grouped by module, operation or scope
            for event in line.events:
                stats = dict(event.stats)
                if devices or "hlo_op" in stats:
                    events.append((str(stats.get("hlo_op", event.name)), event.duration_ns))
    return events


def bandwidths(bank_array) -> tuple[float, float]:
    """Bytes per second of a device copy (read and written), and of pinned host memory to the device."""
    import jax
    import jax.numpy as jnp

    ones = jnp.ones(2**28, jnp.float32)
    copy = jax.jit(lambda a, n: a + n)
    copy(ones, 1.0).block_until_ready()

    def seconds(run) -> float:
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(run())
            taken.append(time.perf_counter() - began)
        return min(taken)

    device = seconds(lambda: [copy(ones, float(n)) for n in range(4)]) / 4
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    link = seconds(lambda: jax.device_put(bank_array, on_device))
    return 2 * ones.nbytes / device, bank_array.nbytes / link


def needed_bytes(config, itemsize: int, rows: int, misses: int, wanted: int, tokens: int, window: int) -> dict:
    """Bytes per step that each part must move at least."""
    c, layers = config, len(config.moe_layers)
    heads = c.num_attention_heads + 2 * c.num_key_value_heads
    attention = c.hidden_size * c.head_dim * (heads + c.num_attention_heads)
    kept = 2 * window * c.num_key_value_heads * c.head_dim
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    return {
        "attention": itemsize * c.num_hidden_layers * (attention + kept),
        "router": itemsize * layers * c.hidden_size * c.num_experts,
        "loads": itemsize * layers * misses * expert,
        "products": itemsize * layers * rows * expert,
        "of these, wanted": itemsize * layers * wanted * expert,
        "shared_experts": itemsize * layers * c.num_shared_experts * expert,
        "lm_head": itemsize * c.hidden_size * c.vocab_size + 4 * tokens * c.vocab_size,
        "decoding_rule": 4 * tokens * c.vocab_size,
        "other": itemsize * c.first_k_dense_replace * 3 * c.hidden_size * c.intermediate_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llada2.0-mini")
    parser.add_argument("--model", help="a checkpoint folder's config.json in place of a preset; weights stay random")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--capacity", type=int, default=100)
    parser.add_argument("--wanted", type=int, default=70)
    parser.add_argument("--misses", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--form", default="load-then-compute", choices=["load-then-compute", "stream"])
    parser.add_argument("--json", help="write the figures into this file")
    parser.add_argument("--wall-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    wall = None
    if not args.wall_only:
        # First and in a process of its own, the step as users run it: XLA's flags hold for a whole process.
        command = [sys.executable, __file__, *sys.argv[1:], "--wall-only"]
        wall = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_COMMAND_BUFFERS}".strip()

    import jax
    import jax.numpy as jnp
    from bench_step import BLOCK, CONTEXT, START, WARM, Stepper, made_up_routing
    from random_engine import banked, geometry, random_weights

    from oled_jax import Engine
    from oled_jax.offload.offloaded import OffloadedExperts
    from oled_jax.offload.scripted import ScriptedRouting
    from oled_jax.retention import policy_by_name

    config = geometry(args.preset, args.layers, args.model)
    model, experts = random_weights(config, jnp.dtype(args.dtype))
    bank = banked(experts)
    del experts
    runner = OffloadedExperts(config.num_experts, args.capacity, policy_by_name("lru"), form=args.form)
    scripted = ScriptedRouting(runner, made_up_routing(config, args.wanted, (args.misses,)))
    stepper = Stepper(Engine(model, bank, context_length=CONTEXT, runner=scripted), (args.misses,))
    stepper.run()
    medians = [phases(stepper, WARM) for _ in range(3)]
    here = {name: statistics.median(each[name] for each in medians) for name in medians[0]}
    if args.wall_only:
        print(json.dumps(here))
        return

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps = len(stepper.run())
        events = device_events(folder)
    parts = parts_of(stepper.engine.programs.text("denoise"))
    spent, launches, heaviest = collections.Counter(), collections.Counter(), collections.Counter()
    for name, nanoseconds in events:
        # The once-running loops contain the others' time.
        if not name.startswith(("while", "call", "conditional")):
            part = parts.get(name, "unknown")
            spent[part] += nanoseconds
            launches[part] += 1
            heaviest[f"{part}: {name}"] += nanoseconds
    device, link = bandwidths(bank[config.moe_layers[0]].gate_up)
    rows = args.capacity + runner.staging
    needed = needed_bytes(config, jnp.dtype(args.dtype).itemsize, rows, args.misses, args.wanted, BLOCK, START)
    lines = []
    for name in (*PARTS, "other", "unknown"):
        bytes_ = needed.get(name, 0)
        ideal = 1e3 * bytes_ / (link if name == "loads" else device)
        lines.append(Part(name, spent[name] / steps / 1e6, launches[name] / steps, bytes_ / 1e6, ideal))
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.form}, N = {args.capacity}")
    print(f"{args.misses} misses and {args.wanted} wanted experts a layer; block {BLOCK}, {START} committed positions")
    print(f"device copy {device / 1e9:.0f} GB/s, link {link / 1e9:.1f} GB/s; {steps} steps profiled\n")
    print_parts(lines)
    wanted = needed["of these, wanted"]
    print(f"\nwanted experts alone: {wanted / 1e6:.1f} MB, {1e3 * wanted / device:.3f} ms")
    print("\nheaviest operations, ms per step")
    for name, nanoseconds in heaviest.most_common(12):
        print(f"{nanoseconds / steps / 1e6:9.3f}  {name}")
    print(f"\n{'ms per step':28s} {'as users run it':>16s} {'profiled form':>14s}")
    for name in here:
        print(f"{name:28s} {wall[name]:16.3f} {here[name]:14.3f}")
    if args.json:
        figures = {"parts": [dataclasses.asdict(line) for line in lines], "wall": wall, "without_command_buffers": here}
        figures |= {"device_bandwidth": device, "link_bandwidth": link, "wanted_bytes": wanted}
        Path(args.json).write_text(json.dumps(figures, indent=1))


def phases(stepper, warm: int) -> dict[str, float]:
    """Medians in ms: a whole step, then of steps that wait for the device before they read their report."""
    steps = stepper.run(apart=True)[warm:]
    return {
        "whole step": statistics.median(step.ms for step in stepper.run()[warm:]),
        "dispatch": statistics.median(step.dispatched for step in steps),
        "then waiting for the device": statistics.median(step.ready - step.dispatched for step in steps),
        "then host read, bookkeeping": statistics.median(step.ms - step.ready for step in steps),
    }


def print_parts(lines: list[Part]) -> None:
    """The table; a star marks what takes more than 1.5 times its ideal."""
    print(f"{'part':16s} {'':38s}      ms  launches        MB   ideal   ratio")
    for line in lines:
        ratio = (
            f"{line.ms / line.ideal_ms:7.2f}{'*' if line.ms > 1.5 * line.ideal_ms else ' '}" if line.ideal_ms else ""
        )
        ideal = f"{line.megabytes:9.1f} {line.ideal_ms:7.3f}" if line.ideal_ms else " " * 17
        print(f"{line.name:16s} {MEANING.get(line.name, ''):38s} {line.ms:7.3f}  {line.launches:8.1f} {ideal} {ratio}")
    print(f"{'sum':16s} {'':38s} {sum(line.ms for line in lines):7.3f}")


if __name__ == "__main__":
    main()
