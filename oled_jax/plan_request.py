"""What is asked of the planner: checked arguments, and what a number of experts may be written as.

Promises: whatever is out of its range is one OledError that names the argument, the value and what is accepted. Nothing
is converted silently; shares are exact. Pure.
"""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np

from oled_jax.arguments import integer, is_int
from oled_jax.checkpoint.layout import DTYPES
from oled_jax.config import ModelConfig
from oled_jax.errors import OledError

AUTO, ALL = "auto", "all"
FORMS = ("load-then-compute", "stream")

# Of all decoding rules.
DEFAULT_BLOCK = 32

# Rows per layer for experts that may not stay; all of them where a layer has fewer.
DEFAULT_STAGING = 4

MOST_BYTES = 2**60

# A typing error in a batch is told as such; nobody decodes more sequences than this at once.
MOST_SEQUENCES = 1024


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Checked arguments of ``oled_jax.planner.make_plan``; ``experts`` is N, "auto", or None for full residency."""

    config: ModelConfig
    dtype: np.dtype
    context_length: int
    batch: int
    block_length: int
    experts: int | str | None
    staging: int
    form: str
    sampled: bool
    device_limit: int | None
    host_limit: int | None
    headroom: int


def experts_on_device(value: Any, num_experts: int) -> int | str | None:
    """What ``value`` asks for, of ``num_experts`` E: N, "auto", or None for full residency without machinery.

    None and "all" are full residency; an integer is N, from 1 to E; a share such as "40%" or "12.5%" is
    max(1, floor(share * E)), in exact arithmetic. OledError for anything else.
    """
    if value is None:
        return None
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in (AUTO, ALL):
        return AUTO if text == AUTO else None
    share = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,18})?)\s*%", text, re.ASCII)
    if share and 0 < Fraction(share[1]) <= 100:
        return max(1, math.floor(Fraction(share[1]) / 100 * num_experts))
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else value
    if is_int(number) and 1 <= number <= num_experts:
        return int(number)
    raise OledError(
        f"experts_on_device (--experts-on-device) is {value!r}: give an integer from 1 to {num_experts}, a share above "
        f'0% and up to 100% such as "40%", "auto" for the most that fit, or "all"'
    )


def default_headroom(device_bytes: int) -> int:
    """Bytes that "auto" leaves free of a device: 5 % and 512 MiB.

    5 % is what the planner may be wrong by. The rest is for what its table does not hold: a GPU's context and libraries
    (about half a GiB outside JAX's pool), holes that workspaces of changing sizes leave in that pool, and sampling.
    """
    return device_bytes // 20 + 512 * 2**20


def checked_request(
    config: ModelConfig,
    *,
    dtype: Any,
    context_length: Any,
    batch: Any,
    block_length: Any,
    experts: Any,
    staging: Any,
    form: Any,
    sampled: Any,
    device_limit: Any,
    host_limit: Any,
    headroom: Any,
) -> PlanRequest:
    """The request that ``make_plan``'s arguments make; OledError for the first that is out of its range."""
    known = DTYPES | {of: of for of in DTYPES.values()}
    if not isinstance(dtype, str | np.dtype) or dtype not in known:
        raise OledError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}")
    if form not in FORMS:
        raise OledError(f"form is {form!r}: give {' or '.join(FORMS)}")
    experts = experts_on_device(experts, config.num_experts)
    context_length = integer("context_length (--context)", context_length, 1, config.max_position_embeddings)
    if device_limit is not None:
        device_limit = integer("device_bytes (--device-memory)", device_limit, 1, MOST_BYTES)
    if host_limit is not None:
        host_limit = integer("host_bytes (--host-memory)", host_limit, 1, MOST_BYTES)
    if staging is None:
        staging = min(DEFAULT_STAGING, config.num_experts)
    if headroom is None:
        headroom = default_headroom(device_limit) if experts == AUTO and device_limit else 0
    return PlanRequest(
        config=config,
        dtype=known[dtype],
        context_length=context_length,
        batch=1 << (integer("batch (--batch)", batch, 1, MOST_SEQUENCES) - 1).bit_length(),
        block_length=_checked_block(config, block_length, context_length),
        experts=experts,
        staging=integer("staging (--staging)", staging, 1, config.num_experts),
        form=form,
        sampled=bool(sampled),
        device_limit=device_limit,
        host_limit=host_limit,
        headroom=integer("headroom", headroom, 0, MOST_BYTES),
    )


def _checked_block(config: ModelConfig, block_length: Any, context_length: int) -> int:
    window = config.block_size if config.block_routing else 1
    if block_length is None:
        return max(window, min(DEFAULT_BLOCK, context_length) // window * window)
    block_length = integer("block_length (--block-length)", block_length, 1, context_length)
    if block_length % window:
        raise OledError(
            f"block_length (--block-length) is {block_length}: this model routes experts by windows of {window} "
            f"tokens, give a multiple of {window}"
        )
    return block_length
