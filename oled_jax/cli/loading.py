"""Loading an engine for a command: the plan in one line, then progress, on standard error."""

import argparse
import functools
import sys
from typing import TYPE_CHECKING, Any

from oled_jax.cli.options import OF_A_BUDGET, placement_arguments
from oled_jax.display import CompileLine
from oled_jax.progress import ProgressLine, format_bytes

if TYPE_CHECKING:
    from oled_jax.engine import Engine
    from oled_jax.planner import Plan


def load_engine(args: argparse.Namespace, context_length: int, compiling: CompileLine, **changes: Any) -> "Engine":
    """The engine that the options of ``args`` describe; ``changes`` replace arguments of ``Engine.load``."""
    from oled_jax.engine import Engine

    if args.routing is not None:
        from oled_jax.lab.trace import read_trace

        changes = {"routing": read_trace(args.routing), **changes}
    idle = [f"--{name}" for name in OF_A_BUDGET if getattr(args, name) is not None]
    if "experts_on_device" in changes:
        idle = []  # the user did not ask for that
    progress = ProgressLine("loading")
    arguments = {
        "dtype": args.dtype,
        "context_length": context_length,
        "expert_bias_dtype": args.expert_bias_dtype,
        "on_plan": functools.partial(_show_plan, idle),
        "progress": progress,
        "on_compile": compiling,
        **placement_arguments(args),
        **changes,
    }
    try:
        return Engine.load(args.model, **arguments)
    finally:
        progress.close()


def _show_plan(of_a_budget: list[str], plan: "Plan") -> None:
    """One line, where there is a budget (``oled-jax plan`` shows the table) or options that ask for one."""
    if plan.experts_on_device is None:
        if of_a_budget:
            told = f"{', '.join(of_a_budget)} {'has' if len(of_a_budget) == 1 else 'have'} no effect"
            print(f"note: {told}: all experts stay on the device (see --experts-on-device)", file=sys.stderr)
        return
    print(
        f"plan: {plan.experts_on_device} of {plan.num_experts} experts per layer ({plan.share:.0%}) on the device, "
        f"which needs {format_bytes(plan.device.total)}; {format_bytes(plan.host.bank)} of experts in host memory",
        file=sys.stderr,
    )
