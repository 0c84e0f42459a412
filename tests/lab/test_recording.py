"""From records to rows: who gets one, and how a chunk of a prompt is cut."""

import numpy as np
import pytest

from oled_jax.errors import OledError
from oled_jax.lab import TraceWriter, read_trace
from oled_jax.lab.trace import PADDING
from oled_jax.retention import Routing, StepRecord

LAYERS, EXPERTS, CHOSEN = 2, 6, 2


def record(forward: int, counted: np.ndarray, sequence, *, phase: int, block: int = 0, step: int = 0) -> StepRecord:
    """A record over ``counted`` bool ``[S, T]``; token t of row s is 100 * s + t, and its experts follow from that."""
    rows, tokens = counted.shape
    number = (100 * np.arange(rows)[:, None] + np.arange(tokens)).reshape(-1)
    ids = (number[None, :, None] + np.arange(LAYERS)[:, None, None] + np.arange(CHOSEN)) % EXPERTS
    ids = np.where(counted.reshape(-1)[:, None], ids, -1).astype(np.int32)
    each = np.ones(rows, np.int32)
    nobody = np.zeros((LAYERS, EXPERTS), bool)
    return StepRecord(
        forward=np.int32(forward),
        sequence=np.asarray(sequence, np.int32),
        block=each * block,
        step=each * step,
        phase=each * phase,
        counts=nobody.astype(np.int32),
        resident=nobody,
        admitted=nobody,
        evicted=nobody,
        routing=Routing(
            ids=ids,
            weights=np.full(ids.shape, 0.5, np.float32),
            row=np.where(counted, np.arange(rows)[:, None], -1).reshape(-1).astype(np.int32),
            confidence=(number / 1000).astype(np.float32),
            status=np.full(number.shape, 2, np.int32),
            tokens=number.astype(np.int32),
        ),
    )


def test_rows_are_those_of_sequences_with_tokens(tmp_path):
    everyone, nobody = np.ones(4, bool), np.zeros(4, bool)
    writer = TraceWriter(EXPERTS, {"model": "tiny"})
    writer.add(record(5, np.stack([everyone, nobody, everyone]), [7, 8, -1], phase=1, block=3, step=2))
    writer.add(record(6, np.stack([everyone, everyone, nobody]), [7, 8, -1], phase=2, block=3, step=3))
    writer.write(tmp_path / "a.safetensors")
    trace = read_trace(tmp_path / "a.safetensors")
    assert trace.metadata == {"model": "tiny"}
    for name, expected in {
        "forward": [5, 6, 6],
        "sequence": [7, 7, 8],
        "block": [3, 3, 3],
        "step": [2, 3, 3],
        "phase": [1, 2, 2],
        "tokens": [[0, 1, 2, 3], [0, 1, 2, 3], [100, 101, 102, 103]],
    }.items():
        assert getattr(trace, name).tolist() == expected, name
    np.testing.assert_array_equal(trace.expert_ids[2, 1, :, 0], np.arange(101, 105) % EXPERTS)
    np.testing.assert_array_equal(trace.confidence[2], np.float16(np.arange(100, 104) / 1000))


def test_a_chunk_of_a_prompt_is_one_row_per_block():
    writer = TraceWriter(EXPERTS)
    writer.add(record(0, np.arange(12) < np.array([[12], [6]]), [0, 1], phase=0, block=4))
    writer.add(record(1, np.ones((2, 4), bool), [0, 1], phase=1, block=7))
    trace = writer.trace()
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert trace.block.tolist() == [4, 5, 6, 4, 5, 7, 7]
    assert trace.forward.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert trace.tokens[:5].tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [100, 101, 102, 103],
        [104, 105, 0, 0],
    ]
    assert (trace.expert_ids[4, :, 2:] == PADDING).all() and not (trace.expert_ids[4, :, :2] == PADDING).any()
    assert not trace.weights[4, :, 2:].any() and (trace.confidence[4, 2:] == -1).all()


def test_a_run_of_prefill_alone_keeps_its_chunks():
    writer = TraceWriter(EXPERTS)
    writer.add(record(0, np.ones((1, 8), bool), [0], phase=0))
    assert writer.trace().tokens.shape == (1, 8)


def test_nothing_to_write(tmp_path):
    writer = TraceWriter(EXPERTS)
    with pytest.raises(OledError, match="nothing was recorded"):
        writer.write(tmp_path / "a")
    with pytest.raises(OledError, match="forward 3 has no routing"):
        writer.add(record(3, np.ones((1, 8), bool), [0], phase=1)._replace(routing=None))
    assert not list(tmp_path.iterdir())
