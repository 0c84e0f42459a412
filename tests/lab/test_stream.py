"""The selection of forwards: batches, counts, and what is known of tokens before a forward."""

import numpy as np
import pytest
from hypothesis import given

from oled_jax.errors import OledError
from oled_jax.lab import Stream, Trace
from oled_jax.lab.stream import Tokens
from oled_jax.lab.trace import PADDING
from oled_jax.retention import demand_counts
from oled_jax.retention.record import MASKED, PROMPT
from tests.lab.traces import EXPERTS, TOKENS, arrays, demands, random_trace, traces


def only(trace: Trace, rows) -> Trace:
    return Trace(num_experts=trace.num_experts, **{name: array[rows] for name, array in trace.arrays().items()})


@given(traces(prefill=True))
def test_counts_and_selection(trace):
    every, decoding = Stream(trace, include_prefill=True), Stream(trace)
    assert [forward.index for forward in every.forwards] == list(range(len(every)))
    assert [forward.index for forward in decoding.forwards] == list(range(len(decoding)))
    for stream in (every, decoding):
        for forward in stream.forwards:
            assert len(set(trace.forward[forward.rows])) == 1
            ids = np.where(trace.expert_ids[forward.rows] == PADDING, -1, trace.expert_ids[forward.rows].astype(int))
            expected = sum(demand_counts(row, EXPERTS, np) for row in ids)
            np.testing.assert_array_equal(stream.counts[forward.index], expected)
            assert forward.prefill == (trace.phase[forward.rows][0] == 0) == stream.prefill[forward.index]
            assert stream.steps[forward.index] == trace.step[forward.rows].min()
    assert not decoding.prefill.any()
    np.testing.assert_array_equal(every.counts[~every.prefill], decoding.counts)


def test_batches():
    """Sequences 0 and 1 together, then 1 alone, then 2 and 3, then 4 alone."""
    trace = random_trace(0, 40)
    forward = np.array([0, 0, 1, 1, 2, 3, 3, 4])
    sequence = np.array([0, 1, 1, 0, 1, 3, 2, 4])
    given = {name: array[:8] for name, array in trace.arrays().items()}
    given |= {"forward": forward.astype(np.int32), "sequence": sequence.astype(np.int32), "phase": np.ones(8, np.uint8)}
    forwards = Stream(Trace(num_experts=EXPERTS, **given)).forwards
    assert [forward.batch_rows.tolist() for forward in forwards] == [[0, 1], [1, 0], [1], [1, 0], [0]]
    assert [forward.batch_size for forward in forwards] == [2, 2, 2, 2, 1]
    assert [forward.begins for forward in forwards] == [True, False, False, True, True]


def test_nothing_but_prefill():
    trace = random_trace(0, 9, prefill=True)
    prefill = only(trace, trace.phase == 0)
    with pytest.raises(OledError, match="trace holds no decoding forwards, only prefill: include that"):
        Stream(prefill)
    assert Stream(prefill, include_prefill=True).prefill.all()


def test_more_tokens_than_can_be_counted():
    with pytest.raises(OledError, match="forward 0 has 65536 tokens for one expert; at most 65535"):
        Stream(demands((1,) * 65536, experts=2))
    assert Stream(demands((1,) * 65535, experts=2)).counts[0, 0].tolist() == [0, 65535]


def test_what_is_known_before_a_forward():
    """One sequence: two forwards of a block, the first of the next, one of prefill, and again the second block."""
    given = {name: array[:5] for name, array in arrays(3, 9, batch=1).items()}
    given["sequence"][:], given["forward"] = 0, np.arange(5, dtype=np.int32)
    given["block"], given["phase"] = np.array([4, 4, 5, 0, 5], np.int32), np.array([1, 1, 1, 0, 2], np.uint8)
    given["status"] = np.array([[3, 0, 1], [3, 1, 2], [0, 1, 1], [3, 3, 3], [2, 2, 2]], np.uint8)
    trace = Trace(num_experts=EXPERTS, **given)
    tokens = Tokens(trace)
    pairs = [tokens.next(forward) for forward in Stream(trace, include_prefill=True).forwards]
    fresh = [-1.0] * TOKENS
    expected = [
        (fresh, [PROMPT, MASKED, MASKED]),
        (trace.confidence[0].tolist(), trace.status[0].tolist()),
        (fresh, [MASKED] * 3),
        (fresh, [PROMPT] * 3),
        (trace.confidence[2].tolist(), trace.status[2].tolist()),
    ]
    assert [(before.confidence.tolist(), before.status.tolist()) for before, _ in pairs] == expected
    for row, (before, after) in enumerate(pairs):
        np.testing.assert_array_equal(after.confidence, trace.confidence[row])
        np.testing.assert_array_equal(after.status, trace.status[row])
        for same in (before, after):
            ids = trace.expert_ids[row].astype(np.int32)
            np.testing.assert_array_equal(same.ids, np.where(ids == PADDING, -1, ids))
            np.testing.assert_array_equal(same.weights, trace.weights[row])
            np.testing.assert_array_equal(same.row, np.zeros(TOKENS))


def test_sequences_of_a_forward_stand_one_after_another():
    trace = random_trace(1, 9)
    forward = next(forward for forward in Stream(trace).forwards if len(forward.batch_rows) == 2)
    _, after = Tokens(trace).next(forward)
    np.testing.assert_array_equal(after.row, np.repeat(forward.batch_rows, TOKENS))
    np.testing.assert_array_equal(after.tokens, trace.tokens[forward.rows].reshape(-1))
    np.testing.assert_array_equal(after.weights[1, TOKENS:], trace.weights[forward.rows][1, 1])


@given(traces(prefill=True))
def test_first_blocks(trace):
    """Of every sequence the first block that it decodes; a forward counts as soon as one of its sequences is there."""
    stream = Stream(trace, include_prefill=True)
    decode = trace.phase > 0
    for forward in stream.forwards:
        blocks = [
            trace.block[row] == trace.block[decode & (trace.sequence == trace.sequence[row])][0]
            for row in range(forward.rows.start, forward.rows.stop)
            if decode[row]
        ]
        assert stream.first_block[forward.index] == (forward.prefill or any(blocks))
