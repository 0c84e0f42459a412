"""Where a training step's time goes: a profiler trace, summed by named scope and by operation.

Promises: what the table calls a scope is a ``jax.named_scope`` of ``forward``, ``objective`` or ``training``, forward
and backward apart; the trace itself is kept for a viewer. Time is what the device's streams were busy; the wall time
stands beside it, so that idling shows.

On a GPU run it with ``XLA_FLAGS=--xla_gpu_enable_command_buffer=``: recorded launches do not tell their operations.
"""

import collections
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax

_OPERATION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)
_SCOPES = (
    "embedding",
    "attention",
    "router",
    "shared_experts",
    "experts",
    "dense_mlp",
    "lm_head",
    "loss",
    "optimizer",
    "cast",
)
_LONGEST = 90


def profile(folder: Path, compiled: jax.stages.Compiled, steps: int, run: Callable[[], None]) -> str:
    """Traces ``run``, which runs ``steps`` steps of ``compiled`` and waits for them, into ``folder``; the tables."""
    began = time.perf_counter()
    with jax.profiler.trace(str(folder)):
        run()
    wall = 1e3 * (time.perf_counter() - began) / steps
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return tables(busy_times(newest), operation_names(compiled.as_text()), steps, wall)


def operation_names(text: str) -> dict[str, str]:
    """Path of scopes by operation, from the text of a compiled program."""
    return dict(_OPERATION.findall(text))


def busy_times(trace: Path) -> dict[str, tuple[float, int]]:
    """Nanoseconds and launches by operation, of the devices if the trace has any, else of the host's threads."""
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    spent: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):  # other lines tell of the same time once more
                continue
            for event in line.events:
                stats = dict(event.stats)
                if devices or "hlo_op" in stats:
                    name = str(stats.get("hlo_op", event.name))
                    ns, count = spent[name]
                    spent[name] = (ns + event.duration_ns, count + 1)
    return dict(spent)


def tables(spent: dict[str, tuple[float, int]], names: dict[str, str], steps: int, wall_ms: float) -> str:
    """Time by scope and direction, then the heaviest operations; ``wall_ms`` is that of a step."""
    by_scope: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    for operation, (ns, count) in spent.items():
        key = scope_of(names.get(operation, ""))
        by_scope[key] = (by_scope[key][0] + ns, by_scope[key][1] + count)
    total = sum(ns for ns, _ in spent.values()) / 1e6 / steps
    lines = [f"busy {total:.2f} ms of {wall_ms:.2f} ms a step, tracing included"]
    lines += [_line(key, *value, steps) for key, value in sorted(by_scope.items(), key=lambda item: -item[1][0])]
    lines += ["", "heaviest operations"]
    for operation, value in sorted(spent.items(), key=lambda item: -item[1][0])[:30]:
        lines.append(_line(f"{operation}  {names.get(operation, '')}"[:_LONGEST], *value, steps))
    return "\n".join(lines)


def scope_of(path: str) -> str:
    """The innermost known scope of a path, such as "jit(step)/transpose(jvp(experts))/mul", and the direction."""
    found = [scope for part in path.split("/") for scope in _SCOPES if re.search(rf"(^|\(){scope}\)*$", part)]
    direction = "backward" if "transpose(" in path else "forward"
    return f"{found[-1]} {direction}" if found else f"(other) {path.split('/')[-1]}" if path else "(unknown)"


def _line(name: str, ns: float, count: int, steps: int) -> str:
    return f"{ns / 1e6 / steps:9.3f} ms {count / steps:7.1f}x  {name}"
