"""From what a user asks for (a budget, a policy, a form) to a runner, before anything large is allocated.

Promises: everything that can be wrong with the request is found here, with the exact numbers; the plan is checked
against what the device and the host say that they have, so that a load of minutes does not end in an allocation error.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from oled_jax.config import ModelConfig
from oled_jax.errors import OledError
from oled_jax.model.experts import ExpertRunner
from oled_jax.offload.offloaded import FORMS, OffloadedExperts
from oled_jax.offload.resident import ResidentExperts
from oled_jax.planner import DEFAULT_POOL, POOL_VARIABLE, Plan, make_plan, pinned_pool_advice, pinned_pool_bytes
from oled_jax.progress import format_bytes
from oled_jax.retention import RetentionPolicy, policy_by_name
from oled_jax.retention.manager import RetentionManager

MANAGERS = ("device", "host")


class Budget(NamedTuple):
    """A runner, how to make its manager (None where there is none), and the plan that it was chosen by."""

    runner: ExpertRunner
    new_manager: Callable[[], RetentionManager] | None
    plan: Plan


def choose_budget(
    config: ModelConfig,
    dtype: np.dtype,
    context_length: int,
    *,
    experts_on_device: int | str | None,
    policy: str | RetentionPolicy,
    form: str,
    staging: int | None,
    manager: str,
) -> Budget:
    """The runner for a request; arguments as for ``Engine.load``.

    OledError for an argument out of its range, PlanError when device or host memory is too small.
    """
    if not isinstance(policy, RetentionPolicy):
        policy = policy_by_name(policy)
    for name, value, known in (("form", form, FORMS), ("manager", manager, MANAGERS)):
        if value not in known:
            raise OledError(f"{name} is {value!r}: give {' or '.join(known)}")
    # The rule, and with it the block, is chosen later; the cache and the workspace hardly depend on it.
    block_length = config.block_size if config.block_routing else min(32, context_length)
    plan = make_plan(
        config,
        dtype=dtype,
        context_length=max(context_length, block_length),
        block_length=block_length,
        experts_on_device=experts_on_device,
        staging=staging,
        form=form,
        device_bytes=device_memory(),
        host_bytes=host_memory(),
    )
    if plan.experts_on_device is None:
        return Budget(ResidentExperts(), None, plan)
    if jax.default_backend() == "gpu":
        check_pinned_pool(plan, os.environ.get(POOL_VARIABLE))
    capacity, on_host = plan.experts_on_device, manager == "host"
    runner = OffloadedExperts(config.num_experts, capacity, policy, plan.staging, form, observes=not on_host)
    new_manager = partial(RetentionManager, runner.policy, len(config.moe_layers), config.num_experts, capacity)
    new_manager()  # a table that does not fit the model is told of now, and not after loading
    return Budget(runner, new_manager if on_host else None, plan)


def check_pinned_pool(plan: Plan, limit: str | None) -> None:
    """OledError when CUDA's pool of pinned host memory, of which ``limit`` is the environment's word, is too small."""
    pool = int(limit) * 10**9 if limit and limit.isdecimal() else DEFAULT_POOL
    short = pinned_pool_bytes(plan.host.bank) - pool
    if short > 0:
        raise OledError(
            f"the pool of pinned host memory is {format_bytes(short)} too small for the experts: "
            f"{pinned_pool_advice(plan.host.bank)}"
        )


def device_memory() -> int | None:
    """Bytes that the device lets this process use; None where it does not say (the CPU does not)."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else None


def host_memory() -> int | None:
    """Bytes of physical memory of this machine; None where it cannot be asked."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
