"""What a policy sees of a forward, and what it answers. Plain named tuples: JAX takes them as pytrees as they are.

Shapes: L mixture-of-experts layers, E experts, T token rows, K chosen experts per token, S sequences of the batch.
"""

from typing import Any, NamedTuple

from oled_jax.retention.arrays import Array

PREFILL, DENOISE, KV_WRITE = 0, 1, 2  # phase
MASKED, JUST_COMMITTED, SETTLED, PROMPT = 0, 1, 2, 3  # status


class Routing(NamedTuple):
    """Who chose what, and what is known of the tokens, before a forward's sampling (``gates``) or after (``observe``).

    ``ids`` int32 ``[..., T, K]``, -1 where a row does not count; ``weights`` ``[..., T, K]``, normalised, before the
    scaling factor: a float dtype (rounded to float16 by who reads it) or uint8 in units of 1/255. ``row`` int32
    ``[T]``: the sequence of the batch, -1 for padding. ``confidence`` float ``[T]``: the probability of the sampled
    token; negative means none yet (a new block). ``status`` ``[T]``: 0 masked, 1 just committed, 2 settled, 3 prompt.
    ``tokens`` int32 ``[T]``: the ids as they stand. ``candidates`` int32 ``[T]``: the token whose probability
    ``confidence`` is, written or not, -1 where none was proposed; None where nobody knows.

    Before a forward's sampling, ``confidence`` and ``status`` are those of the same positions after the forward before.
    """

    ids: Array
    weights: Array
    row: Array
    confidence: Array
    status: Array
    tokens: Array
    candidates: Array | None = None


class StepRecord(NamedTuple):
    """One forward, after its sampling.

    ``forward`` int32: its index, increasing. ``sequence``, ``block``, ``step``, ``phase`` int32 ``[S]``: row s is the
    same sequence from forward to forward; sequence -1 is an empty row; a row without part in this forward has phase 0.
    ``counts`` int32 ``[L, E]``: tokens per expert, all sequences together. ``resident`` (before the step),
    ``admitted``, ``evicted`` bool ``[L, E]``. ``routing``: the whole batch over all layers, ``[L, T, K]``; None is
    enough for a policy whose ``reads_tokens`` is false, and for every policy in a forward of prefill alone.
    """

    forward: Array | int
    sequence: Array
    block: Array
    step: Array
    phase: Array
    counts: Array
    resident: Array
    admitted: Array
    evicted: Array
    routing: Routing | None = None


class Plan(NamedTuple):
    """A policy's answer for one layer (or for all: ``[L, E]``).

    ``keep_rank`` int32 ``[..., E]``: higher stays; ``admit_rank`` int32 ``[..., E]``: higher is admitted, and fetched,
    first; both unique within a layer, so that no float decides a tie. ``may_admit`` bool ``[..., E]``.
    """

    keep_rank: Array
    admit_rank: Array
    may_admit: Array


def is_prefill(record: StepRecord, xp: Any) -> Array:
    """True for a forward in which no sequence decodes, bool ``[]``: it updates recency but not frequency."""
    return ~xp.any(takes_part(record, xp))


def takes_part(record: StepRecord, xp: Any) -> Array:
    """Which sequences decode in this forward, bool ``[S]``."""
    return (xp.asarray(record.sequence) >= 0) & (xp.asarray(record.phase) > PREFILL)
