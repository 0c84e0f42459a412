"""Trace files: what is written is read back, and what is no trace is told, all of it at once."""

import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from oled_jax.errors import OledError
from oled_jax.lab import Stream, Trace, read_trace, write_trace
from oled_jax.lab.trace import PADDING
from tests.lab.traces import EXPERTS, arrays, random_trace

METADATA = {"model": "tiny", "config": {"num_experts": EXPERTS}, "decoding": {"threshold": 0.9}}


def write_raw(path, given: dict, about: object = None, **metadata):
    """A safetensors file of any arrays, as they were before version 1; ``about``: the JSON of its metadata entry."""
    about = {"num_experts": EXPERTS} if about is None else about
    path.write_bytes(safetensors.numpy.save(given, {"trace": json.dumps(about)} | metadata))
    return path


def told(path) -> str:
    with pytest.raises(OledError) as caught:
        read_trace(path)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".safetensors.gz"])
def test_written_and_read_back(tmp_path, suffix):
    trace = Trace(num_experts=EXPERTS, **arrays(0, 9, prefill=True), metadata=METADATA)
    path = tmp_path / f"a{suffix}"
    write_trace(path, trace)
    found = read_trace(path)
    assert (found.num_experts, found.metadata) == (EXPERTS, METADATA)
    for name, array in trace.arrays().items():
        np.testing.assert_array_equal(getattr(found, name), array, strict=True)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == suffix.endswith(".gz")
    write_trace(tmp_path / f"b{suffix}", found)
    assert (tmp_path / f"b{suffix}").read_bytes() == path.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {f"a{suffix}", f"b{suffix}"}


@pytest.mark.parametrize("weights", [np.float16, np.uint8])
def test_other_readers_of_the_format_see_the_same(tmp_path, weights):
    given = arrays(0, 9)
    given["weights"] = (given["weights"] * 255 if weights is np.uint8 else given["weights"]).astype(weights)
    path = tmp_path / "a.safetensors"
    write_trace(path, Trace(num_experts=EXPERTS, **given, metadata={**METADATA, "device": "3", "note": "{"}))
    found = safetensors.numpy.load_file(path)
    assert found.keys() == given.keys()
    for name, array in given.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    with safetensors.safe_open(path, "numpy") as file:
        about = file.metadata()
    assert about == {
        "format": "oled-trace",
        "version": "1",
        "num_experts": str(EXPERTS),
        "model": "tiny",
        "config": '{"num_experts": 8}',
        "decoding": '{"threshold": 0.9}',
        "device": '"3"',
        "note": "{",
    }
    assert read_trace(path).metadata == {**METADATA, "device": "3", "note": "{"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
WRITTEN = ("format", "version", "num_experts", "sequences")


@given(st.dictionaries(st.text("abcde", min_size=1).filter(lambda key: key not in WRITTEN), JSON, max_size=3))
def test_metadata_are_read_back(tmp_path_factory, metadata):
    path = tmp_path_factory.getbasetemp() / "metadata.safetensors"
    write_trace(path, dataclasses.replace(random_trace(0, 2), metadata=metadata))
    assert read_trace(path).metadata == metadata


@pytest.mark.parametrize("text", ["true", " 1", '"a"', "NaN", "[", "", "a\nb", "\ud800", "tiny model"])
def test_strings_stay_strings(tmp_path, text):
    write_trace(tmp_path / "a", dataclasses.replace(random_trace(0, 2), metadata={"model": text}))
    assert read_trace(tmp_path / "a").metadata == {"model": text}


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"format": "safetensors-of-something"}, "its format is 'safetensors-of-something'; a trace's is 'oled-trace'"),
        ({"format": "oled-trace"}, "its version is None; this release of oled-jax reads 1"),
        ({"format": "oled-trace", "version": "2", "num_experts": "8"}, "its version is 2; this release"),
        ({"format": "oled-trace", "version": "1"}, "num_experts is None; it must be an integer"),
        ({"format": "oled-trace", "version": "1", "num_experts": "eight"}, "num_experts is 'eight'; it must be"),
        ({}, 'its metadata have no entry "format" that says oled-trace'),
    ],
)
def test_metadata_that_are_not_those_of_a_trace(tmp_path, about, expected):
    (tmp_path / "a").write_bytes(safetensors.numpy.save(arrays(0, 3), about))
    message = told(tmp_path / "a")
    assert expected in message and ": 1 problem: " in message


def labelled(*entries: dict) -> Trace:
    """Three batches of two sequences (2 and 3, 4 and 5, 6 and 7), described by ``entries``."""
    return dataclasses.replace(random_trace(3, 14, prefill=True), metadata={"model": "m", "sequences": list(entries)})


def test_tasks_and_splits(tmp_path):
    trace = labelled(
        {"sequence": 2, "task": "copy", "split": "calibration"}, {"sequence": 3, "task": "sort"}, {"sequence": 5}
    )
    write_trace(tmp_path / "a.gz", trace)
    for each in (trace, read_trace(tmp_path / "a.gz")):
        assert (each.tasks, each.splits) == ({2: "copy", 3: "sort"}, {2: "calibration"})
    plain = read_trace(write_raw(tmp_path / "old", arrays(0, 3), {"num_experts": EXPERTS, "model": "m"}))
    assert (plain.tasks, plain.splits, plain.metadata) == ({}, {}, {"model": "m"})


def test_selected_sequences_keep_their_rows_and_forwards():
    trace = labelled({"sequence": 2, "task": "copy"}, {"sequence": 4, "task": "sort"}, {"sequence": 5})
    assert set(trace.sequence.tolist()) == {2, 3, 4, 5, 6, 7}
    found = trace.select([5, 4])
    rows = [row for row in range(len(trace.sequence)) if trace.sequence[row] in (4, 5)]
    for name, array in trace.arrays().items():
        np.testing.assert_array_equal(getattr(found, name), np.stack([array[row] for row in rows]), strict=True)
    assert found.metadata == {"model": "m", "sequences": [{"sequence": 4, "task": "sort"}, {"sequence": 5}]}
    assert trace.tasks == {2: "copy", 4: "sort"}
    # A whole batch asks for what it asked for among the others.
    alone, among = Stream(found, include_prefill=True), Stream(trace, include_prefill=True)
    forwards = [f.index for f in among.forwards if trace.sequence[f.rows.start] in (4, 5)]
    np.testing.assert_array_equal(alone.counts, among.counts[forwards])
    assert [f.begins for f in alone.forwards] == [True] + [False] * (len(forwards) - 1)
    with pytest.raises(OledError, match="trace has no sequence 9, 11: its sequences are 2 to 7"):
        trace.select([2, 9, 11])
    with pytest.raises(OledError, match="trace without any sequence is none: its sequences are 4, 6"):
        trace.select([4, 6]).select([])


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ({"0": {}}, "its metadata entry sequences is no list of objects"),
        ([1], "its metadata entry sequences is no list of objects"),
        ([{"task": "copy"}], "sequences[0] has the number None; it must be an integer of its own, from 0"),
        ([{"sequence": 1}, {"sequence": 1}], "sequences[1] has the number 1; it must be an integer of its own"),
        ([{"sequence": True}], "sequences[0] has the number True"),
        ([{"sequence": 0, "task": 3}], "sequences[0] has the task 3; it must be a string"),
        ([{"sequence": 0, "split": "test"}], "sequences[0] has the split 'test'; it must be calibration or evaluation"),
    ],
)
def test_descriptions_of_sequences_that_cannot_be(tmp_path, sequences, expected):
    with pytest.raises(OledError) as caught:
        dataclasses.replace(random_trace(0, 2), metadata={"sequences": sequences})
    assert expected in str(caught.value)
    about = {"num_experts": EXPERTS, "sequences": sequences}
    assert expected in told(write_raw(tmp_path / "a", arrays(0, 3), about))


def test_views_of_arrays_are_written_as_they_look(tmp_path):
    given = arrays(0, 9)
    half = {name: array[::2] for name, array in given.items()}
    write_trace(tmp_path / "a", Trace(num_experts=EXPERTS, **half))
    np.testing.assert_array_equal(read_trace(tmp_path / "a").expert_ids, given["expert_ids"][::2])


def test_a_file_without_forward_numbers_counts_rows(tmp_path):
    given = arrays(0, 5)
    del given["forward"]
    found = read_trace(write_raw(tmp_path / "a", given))
    np.testing.assert_array_equal(found.forward, np.arange(len(given["sequence"]), dtype=np.int32), strict=True)


def test_a_file_without_candidates_knows_none(tmp_path):
    given = arrays(0, 5)
    del given["candidates"]
    found = read_trace(write_raw(tmp_path / "a", given))
    np.testing.assert_array_equal(found.candidates, np.full_like(given["tokens"], -1), strict=True)


def test_weights_may_be_bytes(tmp_path):
    given = arrays(0, 5)
    given["weights"] = np.full(given["weights"].shape, 255, np.uint8)
    assert read_trace(write_raw(tmp_path / "a", given)).weights.dtype == np.uint8


def test_every_problem_of_the_arrays_is_told(tmp_path):
    given = arrays(0, 5)
    del given["tokens"], given["status"]
    given["block"] = given["block"].astype(np.int64)
    given["confidence"] = given["confidence"][:, :-1].copy()
    given["step"] = given["step"][:, None]
    given["extra"] = np.zeros(3, np.uint8)
    message = told(write_raw(tmp_path / "a", given, {"model": "tiny"}))
    rows = len(given["sequence"])
    for expected in (
        ": 7 problems: ",
        "num_experts is None; it must be an integer from 1 to 65535",
        "tokens is missing; status is missing",
        "'extra' is no array of a trace",
        f"confidence has shape [{rows}, 2]; expert_ids asks for [{rows}, 3] (F, T)",
        "block is I64; it must be int32",
        f"step has shape [{rows}, 1]; it must have 1 axes: F",
    ):
        assert expected in message, message
    assert message.startswith(f"trace {tmp_path / 'a'}: ") and "\n" not in message


def test_every_problem_of_the_values_is_told():
    given = arrays(0, 6)
    given["expert_ids"][2, 1, 0, 1] = EXPERTS
    given["expert_ids"][3, 0, 1, 0] = PADDING
    other = given["expert_ids"][3, 0, 1, 1]
    given["weights"][1, 0, 0, 0] = 1.01
    given["confidence"][1, 2] = np.nan
    given["status"][0, 1] = 4
    given["phase"][4] = 3
    given["sequence"][5] = -1
    given["forward"][4] = 1
    with pytest.raises(OledError) as caught:
        Trace(num_experts=EXPERTS, **given)
    message = str(caught.value)
    for expected in (
        ": 8 problems: ",
        f"expert_ids[2, 1, 0, 1] is {EXPERTS}; it must be below {EXPERTS}, or {PADDING}",
        f"expert_ids[3, 0, 1, 1] is {other}; it must be {PADDING} in all layers and choices of a token, or",
        "weights[1, 0, 0, 0] is 1.0",
        "confidence[1, 2] is nan; it must be at most 1",
        "status[0, 1] is 4; it must be 0 to 3",
        "phase[4] is 3; it must be 0 to 2",
        "sequence[5] is -1; it must not be negative",
        "forward[4] is 1; it must not be smaller than the one before",
    ):
        assert expected in message, message


@pytest.mark.parametrize("value", [-0.5, np.nan, np.inf, 1.001])
def test_weights_outside_0_to_1(value):
    given = arrays(0, 4)
    given["weights"][-1, -1, -1, -1] = value
    with pytest.raises(OledError, match=r"weights\[\d+, 1, 2, 1\] is"):
        Trace(num_experts=EXPERTS, **given)
    for fine in (0.0, -0.0, 1.0):
        given["weights"][-1, -1, -1, -1] = fine
        Trace(num_experts=EXPERTS, **given)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.001])
def test_confidences_that_are_none(value):
    given = arrays(0, 4)
    given["confidence"][-1, 0] = value
    with pytest.raises(OledError, match=r"confidence\[\d+, 0\] is"):
        Trace(num_experts=EXPERTS, **given)
    for fine in (-1, 0, 1):
        given["confidence"][-1, 0] = fine
        Trace(num_experts=EXPERTS, **given)


def test_rows_of_a_forward():
    given = arrays(0, 4)
    given["forward"][:] = 7
    given["phase"][:] = 1
    given["sequence"][:] = np.arange(len(given["sequence"]))
    Trace(num_experts=EXPERTS, **given)
    with pytest.raises(OledError, match=r"sequence\[2\] is 0; it has two decoding rows in one forward"):
        Trace(num_experts=EXPERTS, **given | {"sequence": np.where(given["sequence"] == 2, 0, given["sequence"])})
    mixed = given["phase"].copy()
    mixed[1] = 0
    with pytest.raises(OledError, match=r"forward\[0\] is 7; it holds both prefill and decoding rows"):
        Trace(num_experts=EXPERTS, **given | {"phase": mixed})


def test_an_empty_trace(tmp_path):
    given = {name: array[:0] for name, array in arrays(0, 4).items()}
    assert "expert_ids is empty: its shape is [0, 2, 3, 2]" in told(write_raw(tmp_path / "a", given))


def test_cut_off_anywhere(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for suffix in ("", ".gz"):
        write_trace(tmp_path / f"whole{suffix}", random_trace(0, 5))
        content = (tmp_path / f"whole{suffix}").read_bytes()
        for length in sorted({0, 1, 7, 8, 9, 30, len(content) // 2, len(content) - 9, len(content) - 1}):
            cut.write_bytes(content[:length])
            message = told(cut)
            assert re.match(f"trace {cut} (is|has) .*(truncated|damaged)", message), message
    cut.write_bytes(whole.read_bytes() + b"\0")
    assert "is truncated or damaged: it holds more than" in told(cut)


def test_damaged_data(tmp_path):
    path = tmp_path / "a.gz"
    write_trace(path, random_trace(0, 5))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert "truncated or damaged" in told(path)
    offsets = (
        write_raw(tmp_path / "b", arrays(0, 5)).read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1)
    )
    (tmp_path / "b").write_bytes(offsets)
    assert "is damaged: " in told(tmp_path / "b")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"not a trace at all, but text", "is no safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "has a header that is not of a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{]", "has a header that is not of a safetensors file"),
        (b'\x09\0\0\0\0\0\0\0{"a": {}}', "has a header that is not of a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{}", 'its metadata have no entry "format" that says oled-trace; expert_ids is missing'),
        (gzip.compress(b"short", mtime=0), "is no safetensors file"),
    ],
)
def test_foreign_files(tmp_path, content, expected):
    (tmp_path / "a").write_bytes(content)
    assert expected in told(tmp_path / "a")


@pytest.mark.parametrize("about", [[1], 3, {"num_experts": "8"}, {"num_experts": 0}, {"num_experts": True}])
def test_metadata_that_name_no_number_of_experts(tmp_path, about):
    message = told(write_raw(tmp_path / "a", arrays(0, 3), about))
    assert 'entry "trace" is no JSON object' in message or "num_experts is" in message


def test_metadata_that_are_no_json(tmp_path):
    assert 'entry "trace" is no JSON' in told(write_raw(tmp_path / "a", arrays(0, 3), trace="{"))


def test_paths_that_cannot_be_read(tmp_path):
    assert re.search("cannot be read: .*No such file", told(tmp_path / "absent"))
    assert "cannot be read: it is a folder" in told(tmp_path)
    assert "cannot be read" in told("a\0b")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_trace(path, random_trace(0, 3))
    before = path.read_bytes()
    (tmp_path / "a.tmp").mkdir()
    with pytest.raises(OSError):
        write_trace(path, random_trace(1, 3))
    assert path.read_bytes() == before
