"""Intervals by bootstrap over prompts, and prompts told apart by task.

The unit is what was decoded together: a prompt, or a batch of them, since forwards of a batch belong to all of its
sequences. Policies are compared on the same units (paired), by statistics of sums over units, so that ratios are ratios
of sums. Resamples are drawn from a seed, and equal arguments give equal intervals.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oled_jax.lab.stream import Stream

RESAMPLES = 10_000
_AT_A_TIME = 1 << 22  # drawn numbers


class Interval(NamedTuple):
    """A statistic of all units, and the 95 % of its resamples in the middle; ``units``: how many there are."""

    estimate: float
    low: float
    high: float
    units: int


def by_unit(stream: Stream, amounts: np.ndarray) -> np.ndarray:
    """Sums over each unit's decoding forwards: float64 ``[U, ...]`` from ``amounts`` ``[N, ...]``; U batches."""
    decode = ~stream.prefill
    units, place = np.unique(stream.batches[decode], return_inverse=True)
    sums = np.zeros((len(units), *amounts.shape[1:]))
    np.add.at(sums, place, amounts[decode])
    return sums


def bootstrap(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """The interval of ``statistic``, which turns sums ``[..., K]`` over units into numbers ``[...]``.

    ``sums`` ``[U, K]``: amounts of each unit. None for fewer than two units, or where the statistic of all units is no
    number; resamples of which it is none are left out.
    """
    units = len(sums)
    if units < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = float(statistic(sums.sum(0)))
        found = [statistic(times @ sums) for times in _draws(units, resamples, seed)]
    values = np.concatenate(found)
    values = values[np.isfinite(values)]
    if not np.isfinite(estimate) or not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(estimate, float(low), float(high), units)


def _draws(units: int, resamples: int, seed: int):
    """How often each unit is in a resample, some of them at a time: int64 ``[some, U]``."""
    rng = np.random.default_rng(seed)
    chances, most = np.full(units, 1 / units), max(1, _AT_A_TIME // units)
    for first in range(0, resamples, most):
        yield rng.multinomial(units, chances, size=min(most, resamples - first))


def change(sums: np.ndarray) -> np.ndarray:
    """``a / b - 1`` of sums ``[..., (a, b)]``."""
    return sums[..., 0] / sums[..., 1] - 1


def closure(sums: np.ndarray) -> np.ndarray:
    """Gap closure of sums ``[..., (misses, of LRU, of the bound)]``."""
    return (sums[..., 1] - sums[..., 0]) / (sums[..., 1] - sums[..., 2])


def mean_ratio(ratios: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval | None:
    """The geometric mean of ``ratios`` ``[U]``, one for each unit, such as times per token of two policies."""
    sums = np.stack([np.log(ratios), np.ones(len(ratios))], axis=-1)
    found = bootstrap(sums, lambda total: total[..., 0] / total[..., 1], resamples=resamples, seed=seed)
    return found and Interval(*np.exp(found[:3]).tolist(), found.units)


def tasks_of(stream: Stream) -> dict[str, np.ndarray]:
    """By task, sorted, which forwards belong to it, bool ``[N]``; those of a batch of several tasks belong to ``a+b``,
    and those of sequences without a task to none."""
    known, trace = stream.trace.tasks, stream.trace
    of_batch: dict[int, set[str | None]] = {}
    for forward, batch in zip(stream.forwards, stream.batches.tolist(), strict=True):
        found = of_batch.setdefault(batch, set())
        found.update(known.get(number) for number in trace.sequence[forward.rows].tolist())
    names = {batch: None if None in found else "+".join(sorted(found)) for batch, found in of_batch.items()}
    every = sorted({name for name in names.values() if name is not None})
    return {task: np.asarray([names[batch] == task for batch in stream.batches.tolist()]) for task in every}
