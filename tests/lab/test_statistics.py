"""Intervals over prompts against plain resampling, and forwards told apart by task."""

import dataclasses

import numpy as np
import pytest

from oled_jax.lab import Stream, replay, rule_by_name
from oled_jax.lab.statistics import bootstrap, by_unit, change, closure, mean_ratio, tasks_of
from tests.lab.traces import random_trace


def test_sums_by_unit():
    stream = Stream(random_trace(1, 40, prefill=True), include_prefill=True)
    found = by_unit(stream, np.stack([np.arange(len(stream)), np.ones(len(stream))], axis=-1))
    decode = ~stream.prefill
    assert len(found) == stream.batches[-1] + 1
    for batch, (indices, count) in enumerate(found):
        mine = decode & (stream.batches == batch)
        assert (indices, count) == (np.flatnonzero(mine).sum(), mine.sum())
    assert [forward.begins for forward in stream.forwards] == (np.diff(stream.batches, prepend=-1) == 1).tolist()


def test_an_interval_equals_plain_resampling():
    rng = np.random.default_rng(0)
    sums = rng.integers(50, 100, (12, 3)).astype(float) - [0, 0, 40]
    for statistic, plain in (
        (change, lambda total: total[0] / total[1] - 1),
        (closure, lambda total: (total[1] - total[0]) / (total[1] - total[2])),
    ):
        found = bootstrap(sums, statistic)
        again = np.asarray([plain(sums[rng.integers(0, 12, 12)].sum(0)) for _ in range(10_000)])
        width = found.high - found.low
        assert found.estimate == pytest.approx(plain(sums.sum(0))) and found.units == 12
        assert found.low == pytest.approx(np.percentile(again, 2.5), abs=0.05 * width)
        assert found.high == pytest.approx(np.percentile(again, 97.5), abs=0.05 * width)
        assert bootstrap(sums, statistic) == found != bootstrap(sums, statistic, seed=1)


def test_pairing_takes_out_what_prompts_have_in_common():
    """Prompts differ by a factor of 50, policies by 10 % in each: of the ratio nothing is uncertain."""
    lru = np.geomspace(10, 500, 8)
    found = bootstrap(np.stack([0.9 * lru, lru], axis=-1), change)
    assert found.low == pytest.approx(-0.1) and found.high == pytest.approx(-0.1)


def test_where_there_is_no_interval():
    assert bootstrap(np.ones((1, 2)), change) is None
    assert bootstrap(np.array([[1.0, 0.0], [2.0, 0.0]]), change) is None
    # Some resamples have nothing to divide by; they are left out.
    found = bootstrap(np.array([[1.0, 2.0], [0.0, 0.0]]), change)
    assert found.estimate == found.low == found.high == -0.5


def test_a_mean_ratio_is_geometric():
    found = mean_ratio(np.array([0.5, 2.0, 1.0]))
    assert found.estimate == pytest.approx(1) and 0.5 <= found.low < 1 < found.high <= 2
    assert mean_ratio(np.array([0.9, 0.9]))[:3] == pytest.approx((0.9, 0.9, 0.9))


def test_tasks_of_batches():
    trace = random_trace(0, 40)
    numbers = np.unique(trace.sequence).tolist()
    plain = Stream(trace)
    assert tasks_of(plain) == {}
    batch_of = {
        int(number): int(plain.batches[forward.index])
        for forward in plain.forwards
        for number in trace.sequence[forward.rows]
    }
    label = {0: "sort", 1: "copy"}
    entries = [{"sequence": n, "task": label.get(batch_of[n], "copy" if n % 2 else "add")} for n in numbers[:-1]]
    stream = Stream(dataclasses.replace(trace, metadata={"sequences": entries}))
    found = tasks_of(stream)
    assert sorted(found) == ["add+copy", "copy", "sort"]
    np.testing.assert_array_equal(found["sort"], stream.batches == 0)
    np.testing.assert_array_equal(found["copy"], stream.batches == 1)
    last = batch_of[numbers[-1]]  # holds a sequence without a task
    np.testing.assert_array_equal(found["add+copy"], (stream.batches > 1) & (stream.batches != last))


def test_counters_of_tasks_add_up():
    stream = Stream(random_trace(0, 40))
    result = replay(stream, rule_by_name("lru"), 3)
    parts = [result.counters(stream.batches % 2 == parity) for parity in (0, 1)]
    assert sum(sum(part.misses) for part in parts) == sum(result.decode.misses) == result.misses_by_forward().sum()
