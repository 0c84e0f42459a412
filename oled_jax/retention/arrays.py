"""The few array operations that numpy and jax.numpy spell differently, each with equal results in both.

Everything here is exact: int32 in, int32 out, no float that could round one way on the host and another on the device.
``xp`` is the module ``numpy`` or ``jax.numpy``; jax itself is never imported.
"""

import math
from typing import Any

import numpy as np

Array = Any  # a numpy or a jax array


def ranks(keys: tuple[Array, ...], xp: Any) -> Array:
    """Ranks 0 to E-1 along the last axis, unique: the largest key gets E-1.

    ``keys``: int32 or bool arrays ``[..., E]`` that broadcast together, the most significant first; what is equal in
    all of them is ordered by id, the smaller id ranking higher. Returns int32 ``[..., E]``.

    On the host this sorts. In a jitted program it counts, for each expert, those that rank below it: E * E comparisons
    fuse into one kernel with whatever computes the keys, where a sort would stand alone.
    """
    if xp is np:
        return _ranks_by_sorting(keys)
    keys = xp.broadcast_arrays(*(xp.asarray(key, xp.int32) for key in keys))
    ids = xp.arange(keys[0].shape[-1], dtype=xp.int32)
    below = ids[:, None] > ids[None, :]  # [j, e]: j ranks below e
    for key in reversed(keys):
        j, e = key[..., :, None], key[..., None, :]
        below = (j < e) | ((j == e) & below)
    return below.sum(-2, dtype=xp.int32)


def _ranks_by_sorting(keys: tuple[np.ndarray, ...]) -> np.ndarray:
    """``ranks`` in numpy: the keys, each as wide as its values need, side by side in one int64 with the id below them.

    One plain sort of such numbers is several times faster than ``lexsort``, and the id that ends each says whose it is.
    Where 63 bits are not enough, the less significant keys are first replaced by the ranks that they give.
    """
    shape = np.broadcast_shapes(*(np.shape(key) for key in keys))
    by_id, id_bits = _by_id(shape[-1])
    combined, used = by_id, id_bits
    for key in reversed(keys):
        key = np.asarray(key, np.int64)
        least = key.min(initial=0)
        bits = int(key.max(initial=0) - least).bit_length()
        if used + bits > 63:
            combined, used = (_places(combined, id_bits).astype(np.int64) << id_bits) + by_id, 2 * id_bits
        if bits:
            combined, used = combined + ((key - least) << used), used + bits
    return _places(np.broadcast_to(combined, shape), id_bits)


def _by_id(experts: int) -> tuple[np.ndarray, int]:
    """What puts the smaller id higher, ``E - 1 - id`` int64 ``[E]``, and how many bits it takes."""
    return np.arange(experts - 1, -1, -1, dtype=np.int64), max(1, (experts - 1).bit_length())


def _places(combined: np.ndarray, id_bits: int) -> np.ndarray:
    """Where each entry stands in the sorted last axis, int32; ``E - 1 - id`` of an entry is in its last bits."""
    experts = combined.shape[-1]
    lists = combined.size // max(1, experts)
    order = experts - 1 - (np.sort(combined, axis=-1).reshape(lists, experts) & ((1 << id_bits) - 1))
    rank = np.empty(combined.size, np.int32)
    rank[order + np.arange(0, combined.size, max(1, experts))[:, None]] = np.arange(experts, dtype=np.int32)
    return rank.reshape(combined.shape)


def best(members: Array, score: Array, count: int | Array, xp: Any) -> Array:
    """The ``count`` members with the highest score, all of them if there are fewer: bool ``[..., E]``.

    ``members`` bool ``[..., E]``; ``score`` int32 ``[..., E]``, not negative, equal ones going by id as in ``ranks``;
    ``count`` an integer or an array that broadcasts against ``[..., E]``.
    """
    score = xp.where(members, score, -1)
    experts = score.shape[-1]
    if xp is not np:
        return members & (ranks((score,), xp) >= experts - count)
    by_id, id_bits = _by_id(experts)
    combined = (score.astype(np.int64) << id_bits) + by_id
    first = np.clip(experts - np.asarray(count), 0, experts - 1)
    least = np.take_along_axis(np.sort(combined, axis=-1), np.broadcast_to(first, (*score.shape[:-1], 1)), axis=-1)
    return members & (combined >= least) & (np.asarray(count) > 0)


def vote_sums(ids: Array, votes: Array, row: Array, rows: int, num_experts: int, xp: Any) -> Array:
    """Adds the votes of tokens for experts, per sequence: int32 ``[rows, ..., E]``.

    ``ids`` int32 ``[..., T, K]``: chosen experts, -1 where a token does not count; ``votes`` int32, broadcasting to
    ``ids``; ``row`` int32 ``[T]``: which sequence of the batch a token belongs to, -1 for none.
    """
    place, votes, shape = _placed(ids, votes, row, rows, num_experts, xp)
    if xp is np:
        # bincount adds in float64, which holds every int32 sum exactly, and is several times faster than add.at.
        sums = np.bincount(place, votes, minlength=math.prod(shape)).astype(np.int32)
    else:
        sums = xp.zeros(math.prod(shape), xp.int32).at[place].add(votes)
    return sums.reshape(shape)


def vote_maxima(ids: Array, votes: Array, row: Array, rows: int, num_experts: int, xp: Any) -> Array:
    """The largest vote of a token for each expert, per sequence, 0 without one; as ``vote_sums`` otherwise.

    ``votes`` are not negative.
    """
    place, votes, shape = _placed(ids, votes, row, rows, num_experts, xp)
    largest = xp.zeros(math.prod(shape), xp.int32)
    if xp is np:
        np.maximum.at(largest, place, votes)
    else:
        largest = largest.at[place].max(votes)
    return largest.reshape(shape)


def _placed(ids: Array, votes: Array, row: Array, rows: int, num_experts: int, xp: Any):
    """Where each vote goes in an array of the shape that comes last, and the vote, 0 where none counts; both flat."""
    ids = xp.asarray(ids, xp.int32)
    lead = ids.shape[:-2]
    lists = math.prod(lead)
    owner = xp.asarray(row, xp.int32)[:, None]
    counted = (ids >= 0) & (owner >= 0)
    place = xp.arange(lists, dtype=xp.int32).reshape(*lead, 1, 1)
    place = (xp.where(counted, owner, 0) * lists + place) * num_experts + xp.where(counted, ids, 0)
    votes = xp.where(counted, xp.broadcast_to(votes, ids.shape), 0).astype(xp.int32)
    return place.reshape(-1), votes.reshape(-1), (rows, *lead, num_experts)


def demand_counts(ids: Array, num_experts: int, xp: Any) -> Array:
    """How many tokens chose each expert: int32 ``[..., E]`` from ``ids`` int32 ``[..., T, K]``, -1 not counted."""
    one = xp.ones((1, 1), xp.int32)
    return vote_sums(ids, one, xp.zeros(ids.shape[-2], xp.int32), 1, num_experts, xp)[0]
