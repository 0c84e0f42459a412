"""The few array operations that numpy and jax.numpy spell differently, each with equal results in both.

Everything here is exact: int32 in, int32 out, no float that could round one way on the host and another on the device.
``xp`` is the module ``numpy`` or ``jax.numpy``; jax itself is never imported.
"""

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
    keys = xp.broadcast_arrays(*(xp.asarray(key, xp.int32) for key in keys))
    experts = keys[0].shape[-1]
    ids = xp.arange(experts, dtype=xp.int32)
    if xp is np:
        order = np.lexsort((np.broadcast_to(-ids, keys[0].shape), *reversed(keys)), axis=-1)
        rank = np.empty(order.shape, np.int32)
        np.put_along_axis(rank, order, np.broadcast_to(ids, order.shape), axis=-1)
        return rank
    below = ids[:, None] > ids[None, :]  # [j, e]: j ranks below e
    for key in reversed(keys):
        j, e = key[..., :, None], key[..., None, :]
        below = (j < e) | ((j == e) & below)
    return below.sum(-2, dtype=xp.int32)


def best(members: Array, score: Array, count: int | Array, xp: Any) -> Array:
    """The ``count`` members with the highest score, all of them if there are fewer: bool ``[..., E]``.

    ``members`` bool ``[..., E]``; ``score`` int32 ``[..., E]``, not negative; ``count`` an integer or an array that
    broadcasts against ``[..., E]``.
    """
    order = ranks((xp.where(members, score, -1),), xp)
    return members & (order >= score.shape[-1] - count)


def vote_sums(ids: Array, votes: Array, row: Array, rows: int, num_experts: int, xp: Any) -> Array:
    """Adds the votes of tokens for experts, per sequence: int32 ``[rows, ..., E]``.

    ``ids`` int32 ``[..., T, K]``: chosen experts, -1 where a token does not count; ``votes`` int32, broadcasting to
    ``ids``; ``row`` int32 ``[T]``: which sequence of the batch a token belongs to, -1 for none.
    """
    ids = xp.asarray(ids, xp.int32)
    lead, (tokens, chosen) = ids.shape[:-2], ids.shape[-2:]
    lists = int(np.prod(lead))
    owner = xp.asarray(row, xp.int32)[:, None]
    counted = (ids >= 0) & (owner >= 0)
    place = xp.arange(lists, dtype=xp.int32).reshape(*lead, 1, 1)
    place = (xp.where(counted, owner, 0) * lists + place) * num_experts + xp.where(counted, ids, 0)
    votes = xp.where(counted, xp.broadcast_to(votes, (*lead, tokens, chosen)), 0).reshape(-1)
    size = rows * lists * num_experts
    if xp is np:
        # bincount adds in float64, which holds every int32 sum exactly, and is several times faster than add.at.
        sums = np.bincount(place.reshape(-1), votes, minlength=size).astype(np.int32)
    else:
        sums = xp.zeros(size, xp.int32).at[place.reshape(-1)].add(votes.astype(xp.int32))
    return sums.reshape(rows, *lead, num_experts)


def demand_counts(ids: Array, num_experts: int, xp: Any) -> Array:
    """How many tokens chose each expert: int32 ``[..., E]`` from ``ids`` int32 ``[..., T, K]``, -1 not counted."""
    one = xp.ones((1, 1), xp.int32)
    return vote_sums(ids, one, xp.zeros(ids.shape[-2], xp.int32), 1, num_experts, xp)[0]
