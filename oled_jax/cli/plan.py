"""``oled-jax plan``: what a model takes on the device and in host memory, before anything is loaded.

The table goes to standard output, and with ``--json`` one object with all figures as integers of bytes. What does not
fit is a mistake like any other: one line with the numbers and the largest setting that fits. Reads at most a
``config.json``; needs no accelerator and starts none.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oled_jax.assets import DEMO, model_folder
from oled_jax.cli.running import argument_type
from oled_jax.config import ModelConfig, preset_names
from oled_jax.errors import OledError
from oled_jax.progress import parse_bytes

if TYPE_CHECKING:
    from oled_jax.planner import Plan

# What is put side by side when no number of experts was asked for: full residency, and offloaded from all to one.
SIDE_BY_SIDE = ("all", "100%", "75%", "50%", "40%", "25%", "12.5%", 1)

_DEVICE_LINES = {
    "embeddings": "embeddings",
    "head": "head",
    "attention": "attention",
    "dense": "dense layers",
    "shared_experts": "shared experts",
    "norms": "norms",
    "router": "routers",
    "resident_slots": "resident experts",
    "staging_slots": "staging rows",
    "kv_cache": "KV cache",
    "block_state": "KV of the current blocks",
    "workspace": "workspace (estimate)",
    "loading": "more while loading",
    "reserve": "allocator reserve",
}
_HOST_LINES = {
    "bank": "expert bank, pinned",
    "loading_buffers": "loading buffers",
    "process": "process",
}


def add_parser(subparsers: Any) -> None:
    """Adds ``plan`` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="show what a model takes in memory",
        description="Shows what a LLaDA2.x model takes on the device and in host memory, without loading it.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH|PRESET",
        type=model_folder,
        help=f"checkpoint folder, config.json, {DEMO} (the one that ships), or one of {', '.join(preset_names())}",
    )
    parser.add_argument(
        "--experts-on-device",
        metavar="N|P%|auto|all",
        help="experts of each layer that may stay on the device (default: auto with --device-memory; without it, "
        "several side by side)",
    )
    size = argument_type(_memory)
    parser.add_argument(
        "--device-memory",
        type=size,
        metavar="24GiB",
        help="device memory that JAX may use: three quarters of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says "
        "otherwise",
    )
    parser.add_argument("--host-memory", type=size, metavar="64GiB", help="host memory that may be used")
    parser.add_argument("--context", type=int, metavar="N", help="positions (default: 4096, or what the model takes)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences decoded together (default: 1)")
    parser.add_argument("--block-length", type=int, metavar="N", help="tokens of a block (default: 32)")
    parser.add_argument(
        "--staging", type=int, metavar="N", help="rows for experts that may not stay (default: 4, or what a layer has)"
    )
    parser.add_argument("--sampled", action="store_true", help="plan for a temperature above 0")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: as in the config)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax plan``; returns the exit code."""
    from oled_jax.planner import AUTO, make_plan

    config = _config(args.model)
    planned = functools.partial(
        make_plan,
        config,
        dtype=args.dtype or config.dtype,
        context_length=min(4096, config.max_position_embeddings) if args.context is None else args.context,
        batch=args.batch,
        block_length=args.block_length,
        staging=args.staging,
        sampled=args.sampled,
    )
    wanted = args.experts_on_device
    if wanted is None and args.device_memory is not None:
        wanted = AUTO
    plan = planned(experts_on_device=wanted, device_bytes=args.device_memory, host_bytes=args.host_memory)
    others = _side_by_side(planned, plan) if args.experts_on_device is None else []
    if args.json:
        print(json.dumps(plan.to_json() | {"side_by_side": [other.to_json() for other in others]}))
        return 0
    print(plan_table(plan))
    if others:
        print(f"\n{side_by_side_table(others)}")
    advice = next((each.advice for each in (plan, *others) if each.advice), None)
    if advice:
        print(f"\n{advice}.")
    return 0


def plan_table(plan: "Plan") -> str:
    """The plan for people: what is asked for, then a line for each thing that takes memory."""
    if plan.experts_on_device is None:
        where = f"all {plan.num_experts} on the device, no bank"
    else:
        where = f"{plan.experts_on_device} of {plan.num_experts} ({plan.share:.1%}) on the device, in each MoE layer"
    rows = [
        ("experts", f"{where}; {plan.moe_layers} such layers, {plan.expert_bytes:,} bytes an expert"),
        ("lengths", f"context {plan.context_length}, batch {plan.batch}, blocks of {plan.block_length}; {plan.dtype}"),
    ]
    lines = [f"{name}  {text}" for name, text in rows]
    lines += _section("device", plan.device, _DEVICE_LINES, plan.device_limit, plan.headroom)
    lines += _section("host memory", plan.host, _HOST_LINES, plan.host_limit, 0)
    return "\n".join(lines)


def side_by_side_table(plans: list["Plan"]) -> str:
    """One line for each of several plans that differ in the number of experts on the device."""
    judged = any(plan.device_limit is not None or plan.host_limit is not None for plan in plans)
    device, host = (_unit(max(sizes)) for sizes in zip(*((p.device.total, p.host.total) for p in plans), strict=True))
    lines = [f"experts on device       N/E   device {device}  host {host}" + ("  fits" if judged else "")]
    for plan in plans:
        name = "all, no bank" if plan.experts_on_device is None else f"{plan.experts_on_device}"
        line = f"{name:>17}  {plan.share:8.1%}  {_in(device, plan.device.total):>11}  {_in(host, plan.host.total):>8}"
        lines.append(line + ((f"  {'yes' if plan.fits else 'no'}") if judged else ""))
    return "\n".join(lines)


def _section(title: str, bytes_of: Any, names: dict[str, str], limit: int | None, headroom: int) -> list[str]:
    """One memory's lines (what takes nothing is left out), their sum, and what that leaves."""
    rows = [(label, getattr(bytes_of, field)) for field, label in names.items() if getattr(bytes_of, field)]
    rows.append(("total", bytes_of.total))
    if limit is not None:
        rows += [("available", limit), ("remaining", limit - bytes_of.total)]
    if headroom:
        rows.append(("  of it head-room", headroom))
    unit = _unit(bytes_of.total)
    return ["", f"{title:<28}{unit:>9}", *(f"  {label:<26}{_in(unit, count):>9}" for label, count in rows)]


def _unit(total: int) -> str:
    """In what to show a sum and its parts."""
    return "GiB" if total >= 2**30 else "MiB"


def _in(unit: str, count: int) -> str:
    return f"{count / {'GiB': 2**30, 'MiB': 2**20}[unit]:.2f}"


def _side_by_side(planned: Callable[..., "Plan"], chosen: "Plan") -> list["Plan"]:
    """Plans for ``SIDE_BY_SIDE`` with the limits of ``chosen``, whether they fit or not, each number once."""
    plans = {plan.experts_on_device: plan for plan in (planned(experts_on_device=share) for share in SIDE_BY_SIDE)}
    # An explicit number is held to the device alone; head-room is what "auto" leaves.
    limits = {"device_limit": chosen.device_limit, "host_limit": chosen.host_limit}
    return [dataclasses.replace(plan, **limits) for plan in plans.values()]


def _memory(text: str) -> int:
    """``parse_bytes``, which takes a number without a unit as bytes; nobody means so few."""
    count = parse_bytes(text)
    if count < 2**20:
        raise OledError(f"{text!r} is {count:,} bytes: give a unit, as in 24GiB")
    return count


def _config(model: str) -> ModelConfig:
    """The config of a preset, a checkpoint folder or a config.json."""
    if model in preset_names():
        return ModelConfig.from_preset(model)
    if not model or not Path(model).exists():
        raise OledError(
            f"--model {model or repr(model)} does not exist: give a checkpoint folder, a config.json, {DEMO} (the "
            f"model that ships), or one of the presets {', '.join(preset_names())}"
        )
    return ModelConfig.from_hf(model)
