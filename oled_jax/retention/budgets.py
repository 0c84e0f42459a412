"""Budgets: how many slots each layer gets of a total that is fixed. On the host, before anything runs.

A budget is an int32 array ``[L, 1]``, which can stand wherever a policy or ``step`` takes a capacity. Every comparison
is between budgets of one total. The engine gives every layer the same; unequal budgets are for the replay.
"""

import numpy as np

from oled_jax.errors import OledError


def front_budget(num_layers: int, num_experts: int, total: int) -> np.ndarray:
    """All ``num_experts`` in the first layers until ``total`` slots are given away, int32 ``[L, 1]``."""
    before = np.arange(num_layers, dtype=np.int64) * num_experts
    return np.clip(total - before, 0, num_experts).astype(np.int32)[:, None]


def ratio_budget(demand: np.ndarray, total: int, *, least: int, most: int) -> np.ndarray:
    """Slots in proportion to ``demand`` ``[L]``, how many experts a layer wants on average; int32 ``[L, 1]``.

    No layer gets fewer than ``least`` (the experts that one token chooses) or more than ``most`` (all there are); whole
    numbers by largest remainder, equal ones to the earlier layer. Source: spec 4.18, ``ratio``. OledError where
    ``total`` slots cannot be shared out so.
    """
    demand = np.asarray(demand, np.float64)
    layers = len(demand)
    if not layers * least <= total <= layers * most:
        raise OledError(
            f"{total} slots cannot be shared out over {layers} layers with {least} to {most} each: "
            f"give {layers * least} to {layers * most}"
        )
    if not np.all(np.isfinite(demand) & (demand > 0)):
        raise OledError(f"demand is {demand.tolist()}: give how many experts each layer wants, a number above 0")
    low, high = 0.0, most / demand.min()
    for _ in range(200):  # the scale at which the clipped shares add up to the total
        scale = (low + high) / 2
        if np.clip(demand * scale, least, most).sum() < total:
            low = scale
        else:
            high = scale
    shares = np.clip(demand * high, least, most)
    budget = np.floor(shares + 1e-9).astype(np.int64)
    remainder = np.where(budget < most, shares - budget, -1.0)
    budget[np.argsort(-remainder, kind="stable")[: total - budget.sum()]] += 1
    return budget.astype(np.int32)[:, None]
