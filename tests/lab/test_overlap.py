"""Overlap of what forwards ask for, by hand and against plain sets."""

import numpy as np
import pytest

from oled_jax.lab import Stream
from oled_jax.lab.overlap import at_boundaries, by_gap, by_status, kept_choices, unchanged_tokens
from oled_jax.lab.trace import PADDING
from tests.lab.test_systems import routed
from tests.lab.traces import LAYERS, random_trace


def test_by_hand():
    """Two tokens, one layer: {0, 1}, {0, 2}, {2, 2} | a second block {0, 3}, {3, 3}."""
    forwards = [[[0], [1]], [[0], [2]], [[2], [2]], [[0], [3]], [[3], [3]]]
    trace = routed(*forwards, block=[0, 0, 0, 1, 1], layers=1)
    trace.phase[2] = 2
    stream = Stream(trace)
    one = by_gap(stream, 1)
    assert one.pairs.tolist() == [3]
    assert one.jaccard[0] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert one.recall[0] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert one.cosine[0] == pytest.approx((1 / 2 + 2 / np.sqrt(8) + 2 / np.sqrt(8)) / 3)
    two = by_gap(stream, 2)
    assert (two.pairs[0], two.recall[0]) == (1, 0)
    assert by_gap(stream, 3).pairs[0] == 0 and np.isnan(by_gap(stream, 3).recall[0])
    boundary = at_boundaries(stream)
    assert {name: each.recall[0] for name, each in boundary.items()} == {
        "last to first": 0,
        "last masked to first": 0.5,
        "first to first": 0.5,
    }
    assert unchanged_tokens(stream) == pytest.approx(3 / 6)


def test_by_status_follows_the_same_positions():
    """A masked position stays with its expert, one just committed leaves it, one settled stays."""
    trace = routed([[0], [1], [2]], [[0], [3], [2]], status=[[0, 1, 2], [0, 2, 2]], layers=1)
    stream = Stream(trace)
    found = {name: each.recall[0] for name, each in by_status(stream).items()}
    assert found == {"masked": 1, "just committed": 0, "settled": 1}
    assert kept_choices(stream) == {"masked": 1, "just committed": 0, "settled": 1, "all": pytest.approx(2 / 3)}


@pytest.mark.parametrize("gap", [1, 2])
def test_against_plain_sets(gap):
    trace = random_trace(5, 40, prefill=True)
    found = by_gap(Stream(trace), gap)
    for layer in range(LAYERS):
        jaccards, recalls = [], []
        for number in np.unique(trace.sequence):
            rows = np.flatnonzero((trace.sequence == number) & (trace.phase > 0))
            for earlier, later in zip(rows, rows[gap:], strict=False):
                if trace.block[earlier] == trace.block[later]:
                    a, b = (set(trace.expert_ids[row, layer].flat) - {PADDING} for row in (earlier, later))
                    jaccards.append(len(a & b) / len(a | b))
                    recalls.append(len(a & b) / len(b))
        assert found.pairs[layer] == len(recalls) > 3
        assert found.jaccard[layer] == pytest.approx(np.mean(jaccards))
        assert found.recall[layer] == pytest.approx(np.mean(recalls))
