"""The budget planner: from a model, lengths and a number of experts to bytes on the device and in host memory.

Promises: pure arithmetic on a ``ModelConfig``; neither JAX nor a device is asked, nothing is allocated. Weights, slots,
cache and bank are exact. The workspace is an estimate made from the shapes that the programs compute with
(``workspace``); on a GPU the whole is meant to be right to within 5 % of the device's peak. More experts, positions or
sequences never plan for less. What does not fit is refused with the numbers and the largest setting that fits.

Deliberately not here: how much memory there is (the caller knows, or asks its device), the table that people read
(``oled_jax.cli.plan``), and ``Engine.logits``, whose result takes ``[tokens, V]`` float32 on top.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from oled_jax.checkpoint.layout import EMBEDDING, LM_HEAD, UNIT_BYTES, dense_shapes
from oled_jax.config import ModelConfig
from oled_jax.decoding.chunks import ChunkPlan
from oled_jax.errors import OledError
from oled_jax.plan_request import AUTO, FORMS, PlanRequest, checked_request
from oled_jax.progress import counted
from oled_jax.workspace import largest_program

# Beside the arrays counted one by one: scratch that a GPU's matrix library keeps (32 MiB on Hopper), the maps of slots,
# what a policy remembers, a block's state, results in flight, and every array's size rounded up by the allocator.
RESERVE = 64 * 2**20

# Loading promises to hold less than this in host memory beyond the final arrays.
LOADING_BUFFERS = 2 * 10**9
# Interpreter, JAX, tokenizer and compiled programs: 0.4 GB measured on a CPU; the libraries of a GPU come on top.
PROCESS = 10**9

POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_POOL = 64 * 10**9

GIB = 2**30


class PlanError(OledError):
    """What was asked for does not fit; the message tells by how much, and the largest setting that fits."""


@dataclasses.dataclass(frozen=True)
class _Lines:
    """Lines of a table, in bytes; ``total`` is their sum."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class DeviceBytes(_Lines):
    """Bytes on the device.

    ``resident_slots``: the experts that may stay, all MoE layers together (at full residency: all experts).
    ``block_state``: keys and values of the blocks being decoded. ``workspace``: of the largest program, or of choosing
    kernels for it. ``loading``: what loading needs beyond all that, while one layer's experts lie on the device on
    their way to host memory. ``reserve``: ``RESERVE``.
    """

    embeddings: int
    head: int
    attention: int
    dense: int
    shared_experts: int
    norms: int
    router: int
    resident_slots: int
    staging_slots: int
    kv_cache: int
    block_state: int
    workspace: int
    loading: int
    reserve: int

    @property
    def weights(self) -> int:
        """All weights but the routed experts."""
        names = ("embeddings", "head", "attention", "dense", "shared_experts", "norms", "router")
        return sum(getattr(self, name) for name in names)


@dataclasses.dataclass(frozen=True)
class HostBytes(_Lines):
    """Bytes in host memory: the pinned ``bank`` of all experts (0 at full residency), ``loading_buffers`` (free again
    once loading is over), and the ``process`` itself."""

    bank: int
    loading_buffers: int
    process: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a setting takes.

    ``experts_on_device``: N, or None at full residency, without the machinery of offloading. ``batch``: rounded up to a
    power of two, as programs are compiled. ``expert_bytes``: of one expert of one layer. ``device_limit`` and
    ``host_limit``: bytes there are, or None where unknown; ``headroom``: bytes of the device that are left free.
    """

    num_experts: int
    moe_layers: int
    experts_on_device: int | None
    staging: int
    form: str
    dtype: str
    context_length: int
    batch: int
    block_length: int
    expert_bytes: int
    device: DeviceBytes
    host: HostBytes
    device_limit: int | None
    host_limit: int | None
    headroom: int

    @property
    def share(self) -> float:
        """Share of each layer's experts that may stay on the device, from 0 to 1."""
        return 1.0 if self.experts_on_device is None else self.experts_on_device / self.num_experts

    @property
    def device_remaining(self) -> int | None:
        """What is left of the device, head-room included; negative if it does not fit."""
        return None if self.device_limit is None else self.device_limit - self.device.total

    @property
    def host_remaining(self) -> int | None:
        """What is left of host memory; negative if it does not fit."""
        return None if self.host_limit is None else self.host_limit - self.host.total

    @property
    def advice(self) -> str | None:
        """What has to be set in the environment before such a run on a GPU, if anything."""
        return pinned_pool_advice(self.host.bank) if pinned_pool_bytes(self.host.bank) > DEFAULT_POOL else None

    @property
    def fits(self) -> bool:
        """Whether both memories suffice, as far as they are known."""
        return self._device_short <= 0 and self._host_short <= 0

    @property
    def _device_short(self) -> int:
        return 0 if self.device_limit is None else self.device.total + self.headroom - self.device_limit

    @property
    def _host_short(self) -> int:
        return 0 if self.host_limit is None else self.host.total - self.host_limit

    def to_json(self) -> dict[str, Any]:
        """All fields and totals, bytes as integers."""
        plan = dataclasses.asdict(self)
        plan["device"] |= {"weights": self.device.weights, "total": self.device.total}
        plan["host"] |= {"total": self.host.total}
        names = ("share", "device_remaining", "host_remaining", "fits", "advice")
        return plan | {name: getattr(self, name) for name in names}


def pinned_pool_advice(bank_bytes: int) -> str:
    """One line: the environment variable, with its value, that makes the pinned pool of a CUDA client large enough for
    a bank of ``bank_bytes``."""
    value = -(-pinned_pool_bytes(bank_bytes) // 10**9)
    return (
        f"Set {POOL_VARIABLE}={value} in the environment before JAX starts: on CUDA the pool of pinned host memory "
        f"ends at {DEFAULT_POOL // 10**9} GB by default, and the bank takes {_gib(bank_bytes)}, with gaps beside it"
    )


def pinned_pool_bytes(bank_bytes: int) -> int:
    """How large CUDA's pool of pinned host memory should be for a bank of ``bank_bytes``."""
    # The pool grows by regions of doubling size and an array never spans two of them, which leaves gaps; what is being
    # loaded passes through it as well. Decimal units: should the variable mean
    # binary ones, so much the better.
    return bank_bytes + bank_bytes // 8 + 2 * LOADING_BUFFERS


def make_plan(
    config: ModelConfig,
    *,
    dtype: str | np.dtype,
    context_length: int,
    batch: int = 1,
    block_length: int | None = None,
    experts_on_device: int | str | None = None,
    staging: int | None = None,
    form: str = FORMS[0],
    sampled: bool = False,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    headroom: int | None = None,
) -> Plan:
    """Plans a run of ``batch`` sequences of ``context_length`` positions in blocks of ``block_length`` (default: 32, or
    what the context and the model's routing windows leave of it).

    ``experts_on_device``: as ``oled_jax.plan_request.experts_on_device`` reads it. "auto" takes the most that fit into
    ``device_bytes`` with ``headroom`` bytes left (default: ``default_headroom``); a number is held to ``device_bytes``
    alone, unless ``headroom`` is given. ``staging``: rows per layer for experts that may not stay (default: 4, or all
    experts if there are fewer). ``form`` changes no figure: both compute products of one shape. ``sampled``: at a
    temperature above 0, which sorts the logits. ``device_bytes`` and ``host_bytes``: what there is; None is not
    checked. ``dtype``: "bfloat16" or "float32".

    Raises OledError for an argument out of its range, and PlanError when memory does not suffice.
    """
    request = checked_request(
        config,
        dtype=dtype,
        context_length=context_length,
        batch=batch,
        block_length=block_length,
        experts=experts_on_device,
        staging=staging,
        form=form,
        sampled=sampled,
        device_limit=device_bytes,
        host_limit=host_bytes,
        headroom=headroom,
    )
    if request.experts != AUTO:
        plan = _planned(request)
    elif request.device_limit is None:
        raise OledError(
            "experts_on_device is 'auto', and how much memory the device has is not known: give a number of experts or "
            'a share such as "40%"; `oled-jax plan --device-memory 24GiB` tells what fits a device of that size'
        )
    else:
        plan = _with_most_experts(request) or _planned(dataclasses.replace(request, experts=1))
    if not plan.fits:
        raise PlanError(_refusal(request, plan))
    return plan


def _planned(request: PlanRequest) -> Plan:
    """The plan of a request with a number of experts, whether or not it fits."""
    r, c, item = request, request.config, request.dtype.itemsize
    layers, expert = len(c.moe_layers), 3 * c.moe_intermediate_size * c.hidden_size * item
    resident = r.experts is None
    weights = _weights(c, item)
    all_experts = layers * c.num_experts * expert
    positions = c.num_hidden_layers * r.batch * 2 * c.num_key_value_heads * c.head_dim * item
    cached = ChunkPlan.of(c, r.block_length, r.batch).cache_length(r.context_length)
    lines = weights | {
        "resident_slots": all_experts if resident else layers * r.experts * expert,
        "staging_slots": 0 if resident else layers * r.staging * expert,
        "kv_cache": positions * cached,
        "block_state": positions * r.block_length,
        "workspace": largest_program(
            c, item, r.context_length, r.batch, r.block_length, None if resident else r.experts + r.staging, r.sampled
        ),
    }
    dense = sum(weights.values())
    in_flight = min(UNIT_BYTES, dense + all_experts)
    while_loading = dense + in_flight + (all_experts if resident else (all_experts and c.num_experts * expert))
    device = DeviceBytes(**lines, loading=max(0, while_loading - sum(lines.values())), reserve=RESERVE)
    host = HostBytes(0 if resident else all_experts, min(LOADING_BUFFERS, dense + all_experts), PROCESS)
    return Plan(
        num_experts=c.num_experts,
        moe_layers=layers,
        experts_on_device=r.experts,
        staging=0 if resident else r.staging,
        form=r.form,
        dtype=r.dtype.name,
        context_length=r.context_length,
        batch=r.batch,
        block_length=r.block_length,
        expert_bytes=expert,
        device=device,
        host=host,
        device_limit=r.device_limit,
        host_limit=r.host_limit,
        headroom=r.headroom,
    )


def _weights(config: ModelConfig, item: int) -> dict[str, int]:
    """Bytes of all arrays but the routed experts, by line of the table."""
    lines = dict.fromkeys(("embeddings", "head", "attention", "dense", "shared_experts", "norms", "router"), 0)
    for key, shape in dense_shapes(config).items():
        if key in (EMBEDDING, LM_HEAD):
            line = "embeddings" if key == EMBEDDING else "head"
        elif ".mlp." in key:
            line = next((name for part, name in _MLP_PARTS.items() if part in key), "dense")
        else:
            line = "attention" if any(part in key for part in _ATTENTION_PARTS) else "norms"
        lines[line] += math.prod(shape) * (4 if key.endswith(".expert_bias") else item)
    return lines


_MLP_PARTS = {".gate.": "router", ".shared_experts.": "shared_experts"}
_ATTENTION_PARTS = (".query_key_value.", ".dense.")


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from ``low`` to ``high`` for which ``fits``, which is monotone, or None."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _with_most_experts(request: PlanRequest) -> Plan | None:
    """The plan with the largest N for which the device suffices."""

    def plan(experts: int) -> Plan:
        return _planned(dataclasses.replace(request, experts=experts))

    most = _largest(1, request.config.num_experts, lambda experts: plan(experts)._device_short <= 0)
    return None if most is None else plan(most)


def _refusal(request: PlanRequest, plan: Plan) -> str:
    """What is missing, and what would do."""
    count = plan.experts_on_device
    experts = "all experts" if count is None else f"{counted(count, 'expert')} per layer"
    if request.experts == AUTO and plan._device_short > 0:
        experts = f"auto: {experts}"
    problems = []
    if plan._device_short > 0:
        room = f", {_exact(plan.headroom)} of them head-room" if plan.headroom else ""
        needed = plan.device.total + plan.headroom
        problems.append(
            f"the device needs {_exact(needed)}{room}, and has {_exact(plan.device_limit)}: "
            f"{_exact(plan._device_short)} are missing"
        )
    if plan._host_short > 0:
        problems.append(
            f"host memory needs {_exact(plan.host.total)}, and there are {_exact(plan.host_limit)}: "
            f"{_exact(plan._host_short)} are missing"
        )
    what = f"{experts} on the device, with a context of {plan.context_length} and a batch of {plan.batch}"
    return f"{what}, is too much: {'; '.join(problems)}; {_remedy(request, plan)}"


def _remedy(request: PlanRequest, plan: Plan) -> str:
    if plan._host_short > 0 and plan.experts_on_device is not None:
        device = _planned(dataclasses.replace(request, experts=None)).device.total
        return (
            f"host memory holds all experts whatever their number on the device; with all of them on the device "
            f"(all) there is no bank, and the device needs {_exact(device)}"
        )
    if plan._host_short > 0:
        return "loading needs that much host memory whatever the setting"
    if most := _with_most_experts(request):
        found = (
            f"the largest setting that fits is {counted(most.experts_on_device, 'expert')} per layer ({most.share:.1%})"
        )
        if most._host_short > 0:
            found += f", but its bank takes {_exact(most._host_short)} more host memory than there is"
        return found

    def with_context(length: int) -> Plan:
        return _planned(dataclasses.replace(request, experts=1, context_length=length))

    length = _largest(request.block_length, request.context_length, lambda n: with_context(n)._device_short <= 0)
    if length is not None:
        return f"the largest setting that fits is 1 expert per layer with a context of {length}"
    least = with_context(request.block_length)
    needed, asked = least.device.total + least.headroom, plan.device.total + plan.headroom
    smallest = f"even 1 expert per layer with a context of {request.block_length} needs"
    # Both are then at their highest while weights are loaded, before there is a cache.
    return (
        f"{smallest} as much, because loading the weights does" if needed == asked else f"{smallest} {_exact(needed)}"
    )


def _exact(count: int) -> str:
    return f"{count:,} bytes ({_gib(count)})"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
