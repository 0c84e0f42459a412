"""Where sequences stand in their blocks, and who is wanted where a block begins: what boundary rules remember.

Experts of settled tokens are wanted until their block ends and then lose their value at once. Two things tell when that
is: the forward whose input holds no mask is the last of its block (it writes keys and values), and until then the masks
left, at the pace at which they went, say how many forwards are to come.
"""

from typing import Any, NamedTuple

from oled_jax.retention.arrays import Array, vote_sums
from oled_jax.retention.fixed_point import FACTOR_BITS, FACTOR_ONE, VOTE_ONE
from oled_jax.retention.record import DENOISE, JUST_COMMITTED, MASKED, Routing, StepRecord, takes_part


class RowTokens(NamedTuple):
    """How many tokens each sequence of the batch has in a forward, int32 ``[S]``: all that count, those still masked
    after its sampling, and those that its sampling committed."""

    total: Array
    masked: Array
    committed: Array


def row_tokens(routing: Routing, rows: int, xp: Any) -> RowTokens:
    """The tokens of each of ``rows`` sequences; ``routing`` with all layers, ``[L, T, K]``, after sampling."""
    status = xp.asarray(routing.status, xp.int32)
    own = present_rows(routing, xp) == xp.arange(rows, dtype=xp.int32)[:, None]
    masked, committed = own & (status == MASKED), own & (status == JUST_COMMITTED)
    return RowTokens(*(x.sum(1, dtype=xp.int32) for x in (own, masked, committed)))


def present_rows(routing: Routing, xp: Any) -> Array:
    """The row of each token that counts, -1 for the others, int32 ``[T]``."""
    counted = xp.any(routing.ids >= 0, axis=(0, 2))
    return xp.where(counted, xp.asarray(routing.row, xp.int32), -1)


def denoises(record: StepRecord, xp: Any) -> Array:
    """Which sequences have their tokens sampled in this forward, bool ``[S]``."""
    return takes_part(record, xp) & (xp.asarray(record.phase) == DENOISE)


def boundary_after(boundary: Array, record: StepRecord, eta: int, xp: Any) -> Array:
    """The boundary set after a forward: how regularly an expert is wanted by the first step of a block.

    ``boundary`` int32 ``[L, E]`` in units of 2^-16: a moving average with weight ``eta`` (a factor, 2^-14), which moves
    when a block begins and in a batch looks at the sequences whose block begins alone.
    """
    first = denoises(record, xp) & (xp.asarray(record.step) == 0)
    routing = record.routing
    row = xp.where((routing.row >= 0) & first[xp.maximum(routing.row, 0)], 0, -1)
    wanted = vote_sums(routing.ids, xp.ones((1, 1), xp.int32), row, 1, boundary.shape[1], xp)[0] > 0
    change = (xp.where(wanted, VOTE_ONE, 0).astype(xp.int32) - boundary) * eta
    moved = boundary + ((change + FACTOR_ONE // 2) >> FACTOR_BITS)
    return xp.where(xp.any(first), moved, boundary)


def finishing_after(finishing: Array, same: Array, record: StepRecord, xp: Any) -> Array:
    """Whose coming forward is the last of its block, bool ``[S]``: those whose sampling left no mask.

    ``finishing`` is the answer before ``record``, ``same`` bool ``[S]`` whether a row still holds that sequence: one
    without tokens in this forward stays as it was.
    """
    if record.routing is None:
        return finishing & same
    tokens = row_tokens(record.routing, finishing.shape[0], xp)
    idle = same & (tokens.total == 0)
    return xp.where(idle, finishing, denoises(record, xp) & (tokens.masked == 0))
