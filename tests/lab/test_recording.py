"""From records to rows: who gets one, how a chunk of a prompt is cut, and what an unfinished batch leaves."""

import errno
import os

import numpy as np
import pytest

from oled_jax.errors import OledError
from oled_jax.lab import TraceWriter, read_trace
from oled_jax.lab.recording import row_bytes
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


@pytest.mark.parametrize("weights", ["float16", "uint8"])
def test_a_file_holds_what_the_writer_says(tmp_path, weights):
    writer = TraceWriter(EXPERTS, weights=weights, folder=tmp_path)
    for number in range(5):
        writer.add(record(number, np.arange(12) < np.array([[12], [6]]), [0, 1], phase=0))
    writer.add(record(5, np.ones((2, 4), bool), [0, 1], phase=1))
    assert not list(tmp_path.iterdir())
    trace = writer.trace()
    writer.write(tmp_path / "a.safetensors")
    found = read_trace(tmp_path / "a.safetensors")
    for name, array in trace.arrays().items():
        np.testing.assert_array_equal(getattr(found, name), array, strict=True)
    assert (writer.rows, writer.forwards, writer.tokens_per_row) == (27, 6, 4)
    assert writer.nbytes == sum(array.nbytes for array in trace.arrays().values())
    assert writer.nbytes == 27 * row_bytes(LAYERS, 4, CHOSEN, weights)
    assert trace.weights.dtype == weights
    counted = trace.expert_ids != PADDING
    assert set(trace.weights[counted].tolist()) == {128 if weights == "uint8" else 0.5}  # 127.5 goes to the even one


def test_bytes_are_the_nearest_to_the_weights():
    given = record(0, np.ones((1, 4), bool), [0], phase=1)
    weights = np.linspace(0, 1, LAYERS * 4 * CHOSEN, dtype=np.float16).reshape(LAYERS, 4, CHOSEN)
    writer = TraceWriter(EXPERTS, weights="uint8")
    writer.add(given._replace(routing=given.routing._replace(weights=weights)))
    stored = writer.trace().weights[0]
    candidates = np.abs(np.arange(256) / 255 - weights[..., None].astype(float))
    np.testing.assert_array_equal(stored, candidates.argmin(-1))
    with pytest.raises(OledError, match="weights is 'int4': give float16 or uint8"):
        TraceWriter(EXPERTS, weights="int4")


def test_a_batch_says_what_its_sequences_are():
    writer = TraceWriter(EXPERTS)
    writer.metadata["model"] = "tiny"
    labels = [{"task": "copy", "split": "calibration"}, {"task": "sort"}, {}]
    with writer.batch(labels):
        # The first row takes no part in the prefill, the fourth is none of the batch.
        prompts = np.array([[0], [4], [4], [0]])
        writer.add(record(0, np.arange(4) < prompts, [-1, 9, 10, 11], phase=0))
        writer.add(record(1, np.ones((4, 4), bool), [8, 9, 10, -1], phase=1))
        labels[0]["generated_tokens"] = 5
    writer.add(record(2, np.ones((1, 4), bool), [12], phase=1))
    trace = writer.trace()
    assert trace.tasks == {8: "copy", 9: "sort"} and trace.splits == {8: "calibration"}
    assert trace.metadata == {
        "model": "tiny",
        "sequences": [
            {"sequence": 8, "task": "copy", "split": "calibration", "generated_tokens": 5},
            {"sequence": 9, "task": "sort"},
            {"sequence": 10},
        ],
    }


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_an_unfinished_batch_leaves_nothing(tmp_path, first):
    def batch(writer, start: int, interrupted: bool) -> None:
        with writer.batch([{"id": start}]):
            writer.add(record(start, np.ones((1, 8), bool), [start], phase=0))
            for forward in (1, 2):
                writer.add(record(start + forward, np.ones((1, 4), bool), [start], phase=1))
            if interrupted:
                raise KeyboardInterrupt

    writer, expected = TraceWriter(EXPERTS), TraceWriter(EXPERTS)
    for start in (0, 10, 20):
        interrupted = start == (0 if first else 10)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                batch(writer, start, True)
        else:
            batch(writer, start, False)
            batch(expected, start, False)
        assert (writer.rows, writer.forwards) == (expected.rows, expected.forwards)
    writer.write(tmp_path / "a")
    expected.write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_full_disk(tmp_path, monkeypatch):
    write, left = os.pwrite, [100]

    def pwrite(descriptor, content, at):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = min(left[0], len(content), 64)
        left[0] -= count
        return write(descriptor, content[:count], at)

    writer, one = TraceWriter(EXPERTS), record(0, np.ones((1, 4), bool), [0], phase=1)
    monkeypatch.setattr(os, "pwrite", pwrite)
    left[0] = row_bytes(LAYERS, 4, CHOSEN) + 100
    writer.add(one)
    with pytest.raises(OSError, match="No space left"):
        writer.add(one._replace(forward=np.int32(1)))
    left[0] = 1000
    writer.add(one._replace(forward=np.int32(2)))
    assert writer.trace().forward.tolist() == [0, 2]
    np.testing.assert_array_equal(writer.trace().tokens, [[0, 1, 2, 3]] * 2)


def test_blocks_of_two_lengths():
    writer = TraceWriter(EXPERTS)
    writer.add(record(0, np.ones((2, 4), bool), [0, 1], phase=1))
    with pytest.raises(OledError, match="blocks of 8 tokens follow blocks of 4: a trace holds one length"):
        writer.add(record(1, np.ones((2, 8), bool), [0, 1], phase=1))


def test_nothing_to_write(tmp_path):
    writer = TraceWriter(EXPERTS)
    with pytest.raises(OledError, match="nothing was recorded"):
        writer.write(tmp_path / "a")
    with pytest.raises(OledError, match="forward 3 has no routing"):
        writer.add(record(3, np.ones((1, 8), bool), [0], phase=1)._replace(routing=None))
    assert not list(tmp_path.iterdir())
