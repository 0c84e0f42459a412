"""``oled-jax trace``: the file holds what the engine told, and nothing is left of what went wrong.

A real model answers (tests/golden); where loading it is not what is tested, one engine serves all tests.
"""

import errno
import itertools
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_jax import Engine
from oled_jax.cli import main
from oled_jax.cli import trace as command
from oled_jax.cli.trace import batches
from oled_jax.lab import Stream, TraceWriter, read_trace
from oled_jax.lab.trace import PADDING
from tests import golden_fixtures
from tests.cli.conftest import TINY
from tests.cli.test_interrupts import run_command

OPTIONS = ("--mask-id", "319", "--eos-id", "316", "--block-length", "8", "--steps", "8", "--threshold", "0.9")
OPTIONS += ("--gen-length", "16")
LINES = [
    {"prompt_ids": list(range(20, 41)), "task": "copy", "split": "calibration", "id": "first"},
    {"prompt_ids": [5, 6, 7], "task": "sort", "split": "calibration", "seed": 3},
    {"prompt_ids": [15, 6, 7, 8, 9, 10, 11, 12], "task": "sort", "split": "evaluation", "id": 4},
    {"prompt_ids": [25, 6, 7]},
]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture
def out(tmp_path):
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces" / "run.safetensors"


@pytest.fixture
def loads(monkeypatch):
    """One engine serves every load; the arguments of the loads."""
    engine, found = golden_fixtures.engine("llada2-tiny-f32"), []

    def load(path, **arguments):
        found.append(arguments)
        return engine

    monkeypatch.setattr(Engine, "load", staticmethod(load))
    return found


@pytest.fixture
def records(monkeypatch):
    """What the command's writer is told."""
    add, found = TraceWriter.add, []

    def listen(writer, record):
        found.append(record)
        add(writer, record)

    monkeypatch.setattr(TraceWriter, "add", listen)
    return found


def trace(*arguments, model=TINY):
    return main(["trace", "--model", str(model), *map(str, arguments)])


def expected_rows(records, length: int) -> list[dict]:
    """The rows of a trace, position by position, straight from the description of a record."""
    rows = []
    for record in records:
        routing, sequences = record.routing, len(record.sequence)
        tokens = len(routing.row) // sequences
        for s in range(sequences):
            for piece, start in enumerate(range(s * tokens, (s + 1) * tokens, length)):
                counted = [at for at in range(start, start + length) if at < len(routing.row) and routing.row[at] == s]
                if record.sequence[s] >= 0 and counted:
                    rows.append({"record": record, "s": s, "piece": piece, "counted": counted})
    return rows


def test_the_file_holds_what_the_engine_told(prompts, out, loads, records, capsys):
    code = trace("--prompts-file", prompts, "--out", out, "--batch-size", 2, "--json", *OPTIONS)
    told = json.loads(capsys.readouterr().out)
    assert code == 0 and [each.name for each in out.parent.iterdir()] == [out.name]
    found = read_trace(out)
    rows = expected_rows(records, 8)
    assert len(rows) == len(found.sequence) == told["rows"]
    assert found.tokens_per_row == told["tokens_per_row"] == 8
    for index, row in enumerate(rows):
        record, counted = row["record"], row["counted"]
        for name in ("sequence", "step", "phase"):
            assert getattr(found, name)[index] == getattr(record, name)[row["s"]], name
        assert found.block[index] == record.block[row["s"]] + row["piece"]
        assert found.forward[index] == record.forward
        count = len(counted)
        for name, of_file in (("ids", found.expert_ids), ("weights", found.weights)):
            expected = np.stack([getattr(record.routing, name)[:, at] for at in counted], axis=1)
            np.testing.assert_array_equal(of_file[index][:, :count], expected, name)
        for name in ("confidence", "status", "tokens"):
            expected = [getattr(record.routing, name)[at] for at in counted]
            np.testing.assert_array_equal(getattr(found, name)[index][:count], expected, name)
        assert (found.expert_ids[index][:, count:] == PADDING).all()

    numbers = sorted(set(found.sequence.tolist()))
    first = numbers[0]
    assert numbers == [first, first + 1, first + 2, first + 3]
    assert found.tasks == {first: "copy", first + 1: "sort", first + 2: "sort"}
    assert found.splits == {first: "calibration", first + 1: "calibration", first + 2: "evaluation"}
    about = found.metadata["sequences"]
    assert [each.get("id") for each in about] == ["first", None, 4, None]
    assert [each["seed"] for each in about] == [0, 3, 0, 0]
    assert [each["prompt_tokens"] for each in about] == [21, 3, 8, 3]
    denoised = [int(((found.phase == 1) & (found.sequence == number)).sum()) for number in numbers]
    assert [each["num_forwards"] for each in about] == denoised

    # The third prompt is of another split, and the last of none: the first two alone were a batch.
    together = {frozenset(found.sequence[found.forward == forward].tolist()) for forward in found.forward}
    assert frozenset((first, first + 1)) in together and all(len(each) == 1 or first in each for each in together)

    stream = Stream(found)
    assert told["decode_forwards"] == len(stream)
    assert told["prefill_forwards"] == len(set(found.forward[found.phase == 0].tolist()))
    assert told["working_set"] == pytest.approx((stream.counts > 0).sum(-1).mean())
    generated = sum(each["generated_tokens"] for each in about)
    assert told["tokens_per_forward"] == pytest.approx(generated / sum(denoised))
    assert (told["sequences"], told["bytes"], told["routing"]) == (4, out.stat().st_size, "router")


def test_metadata_say_how_it_ran_and_where_nothing(prompts, out, loads, capsys):
    given = ("--prompts-file", prompts, "--out", out, "--experts-on-device", "40%", "--policy", "oled", *OPTIONS)
    assert trace(*given) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{out}: 4 prompts, ") and " decoding forwards and 2 of prefill, W " in text
    assert text.count("\n") == 1 and "scripted" not in text
    assert (loads[0]["experts_on_device"], loads[0]["policy"]) == ("40%", "oled")
    found = read_trace(out)
    about = found.metadata
    assert (found.num_experts, about["model"], about["dtype"]) == (16, "llada2-tiny-f32", "float32")
    expected = {"rule": "threshold", "block_length": 8, "threshold": 0.9, "batch_size": 1, "eos_id": [316]}
    assert expected.items() <= about["decoding"].items()
    assert about["config"]["num_experts"] == 16 and about["versions"].keys() >= {"oled_jax", "jax", "numpy", "python"}
    assert (about["routing"], about["complete"]) == ("router", True)
    assert str(out.parent.parent).encode() not in out.read_bytes()


def test_zipped_and_rounded_to_bytes(prompts, out, loads):
    assert trace("--prompts-file", prompts, "--out", out, *OPTIONS) == 0
    small = out.with_name("run.safetensors.gz")
    assert trace("--prompts-file", prompts, "--out", small, "--weights", "uint8", *OPTIONS) == 0
    assert small.read_bytes()[:2] == b"\x1f\x8b" and small.stat().st_size < out.stat().st_size / 2
    wide, narrow = read_trace(out), read_trace(small)
    np.testing.assert_array_equal(narrow.expert_ids, wide.expert_ids)
    assert narrow.weights.dtype == np.uint8
    off = np.abs(narrow.weights / 255 - wide.weights.astype(float))
    assert off.max() <= 0.5 / 255 + 1e-9 and narrow.weights.any()


def test_the_text_of_prompts_is_stored_on_request(model, out, loads):
    words = "only written here"
    given = ("--prompt", words, "--raw", "--out", out, *OPTIONS)
    assert trace(*given, model=model) == 0
    assert words.encode() not in out.read_bytes()
    assert trace(*given, "--store-prompts", "--force", model=model) == 0
    assert read_trace(out).metadata["sequences"][0]["prompt"] == words


def test_routing_of_a_trace_is_served_and_told(prompts, out, loads, monkeypatch, capsys):
    assert trace("--prompts-file", prompts, "--out", out, *OPTIONS) == 0
    monkeypatch.undo()
    again = out.with_name("again.safetensors.gz")
    given = ("--prompt-ids", "9,8,7,6,5,4,3,2,1", "--out", again, "--routing", out, "--experts-on-device", "5")
    capsys.readouterr()
    assert trace(*given, *OPTIONS) == 0
    assert "routing scripted: taken from a trace, and the answers mean nothing" in capsys.readouterr().out
    source, found = read_trace(out), read_trace(again)
    assert (found.metadata["routing"], found.metadata["routing_trace"]) == ("scripted", out.name)
    decoding = np.flatnonzero(source.phase > 0)
    served = np.flatnonzero(found.phase > 0)
    assert len(served) > 2 and (found.phase == 0).any()
    rows = decoding[found.forward[served] % len(decoding)]
    np.testing.assert_array_equal(found.expert_ids[served], source.expert_ids[rows])
    np.testing.assert_array_equal(found.weights[served], source.weights[rows])
    wrong = (*given, "--force", *OPTIONS[:-6], "--steps", "4", "--block-length", "4", "--gen-length", "8")
    assert trace(*wrong) == 2
    assert "block_length is 4, and the trace that gives the routing has blocks of 8" in capsys.readouterr().err


def interrupted_in(forward: int, error, monkeypatch) -> None:
    """Has the writer's ``forward``-th record raise ``error``."""
    add, seen = TraceWriter.add, []

    def listen(writer, record):
        seen.append(record)
        add(writer, record)
        if len(seen) == forward:
            raise error

    monkeypatch.setattr(TraceWriter, "add", listen)


ERRORS = [(KeyboardInterrupt(), 130, "oled-jax: interrupted"), (OSError(errno.ENOSPC, "full"), 2, "cannot be written")]


@pytest.mark.parametrize(("error", "code", "told"), ERRORS, ids=["interrupt", "disk"])
def test_nothing_is_left_of_an_unfinished_run(prompts, out, loads, monkeypatch, capsys, error, code, told):
    interrupted_in(30, error, monkeypatch)
    assert trace("--prompts-file", prompts, "--out", out, *OPTIONS) == code
    standard, err = capsys.readouterr()
    assert standard == "" and told in err and "kept" not in err
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize(("error", "code", "told"), ERRORS, ids=["interrupt", "disk"])
def test_finished_prompts_are_kept_on_request(prompts, out, loads, monkeypatch, capsys, error, code, told):
    whole = out.with_name("whole.safetensors")
    assert trace("--prompts-file", prompts, "--out", whole, *OPTIONS) == 0
    found = read_trace(whole)
    numbers = sorted(set(found.sequence.tolist()))
    forwards = [len(set(found.forward[found.sequence == number].tolist())) for number in numbers]
    interrupted_in(forwards[0] + forwards[1] + 2, error, monkeypatch)
    capsys.readouterr()
    assert trace("--prompts-file", prompts, "--out", out, "--keep-partial", *OPTIONS) == code
    err = capsys.readouterr().err
    assert told in err and f"{out}: kept 2 of 4 prompts, those that were finished" in err
    part, expected = read_trace(out), found.select(numbers[:2])
    assert (part.metadata["complete"], list(part.tasks.values())) == (False, ["copy", "sort"])
    for name in ("expert_ids", "weights", "tokens", "status", "block", "step", "phase"):
        np.testing.assert_array_equal(getattr(part, name), getattr(expected, name))
    assert {each.name for each in out.parent.iterdir()} == {out.name, whole.name}


def test_nothing_finished_is_nothing_kept(prompts, out, loads, monkeypatch, capsys):
    interrupted_in(3, KeyboardInterrupt(), monkeypatch)
    assert trace("--prompts-file", prompts, "--out", out, "--keep-partial", *OPTIONS) == 130
    assert "kept" not in capsys.readouterr().err and not list(out.parent.iterdir())


def test_a_command_may_take_its_time_to_clean_up(tmp_path):
    result = run_command(
        """
        args.seconds_to_clean_up = 60
        try:
            interrupt()
        finally:
            time.sleep(1.5)  # more than the patience that is left otherwise
            open("cleaned", "w").close()
        """,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stderr) == (130, "oled-jax: interrupted\n")
    assert (tmp_path / "cleaned").exists()


@pytest.fixture
def refused(monkeypatch, prompts, capsys):
    """Runs the command, which must fail as a user's mistake does before anything is loaded; what it says."""

    def load(path, **arguments):
        raise AssertionError("loaded")

    monkeypatch.setattr(Engine, "load", staticmethod(load))

    def run(*arguments):
        assert trace("--prompts-file", prompts, *OPTIONS, *arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("oled-jax: error: ") and err.count("\n") == 1, err
        return err

    return run


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("run.npz", (), "run.npz': give a file whose name ends in .safetensors or .safetensors.gz"),
        (".safetensors", (), "give a file whose name ends in"),
        ("run.safetensors.zip", (), "give a file whose name ends in"),
        ("no/run.safetensors", (), "is not a folder: make it first"),
        ("folder.safetensors", (), "folder.safetensors is a folder: name a file in it"),
        ("there.safetensors", (), "there.safetensors exists: name another file, or replace it with --force"),
        ("there.safetensors", ("--force",), "there.safetensors exists and is no trace, which --force does not replace"),
        ("", (), "--out '': give a file whose name ends in"),
        (f"{'n' * 240}.safetensors", (), "cannot be written: File name too long"),
        ("a.safetensors", ("--model", ""), "--model '' is not a folder"),
        ("a.safetensors", ("--batch-size", 0), "--batch-size is 0: give 1 to 1024"),
        ("a.safetensors", ("--weights", "int4"), "argument --weights: invalid choice: 'int4'"),
        ("a.safetensors", ("--decoding", "editing", "--minimal-topk", 2), "--decoding editing does not take"),
        ("a.safetensors", ("--routing", "absent.safetensors"), "absent.safetensors' cannot be read: No such file"),
        ("a.safetensors", ("--model", "absent"), "--model absent is not a folder"),
    ],
)
def test_mistakes(tmp_path, refused, name, arguments, expected):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "there.safetensors").write_text("mine")
    before = sorted(tmp_path.iterdir())
    assert expected in refused("--out", name and tmp_path / name, *arguments)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "there.safetensors").read_text() == "mine"


def test_nothing_is_written_into_the_model(model, refused, tmp_path):
    (tmp_path / "link").symlink_to(model)
    (model / "traces").mkdir()
    for folder in (model, model / "traces", tmp_path / "link"):
        out = folder / "run.safetensors"
        assert f"--out {out} lies in the folder of --model" in refused("--model", model, "--out", out)


@pytest.mark.parametrize("content", [b"", (1000).to_bytes(8, "little") + b"[]", b"\x1f\x8b", b"\x1f\x8bmine"])
def test_force_replaces_what_is_empty_and_nothing_unknown(out, refused, monkeypatch, content):
    out.write_bytes(content)
    if content:
        assert f"--out {out} exists and is no trace" in refused("--out", out, "--force")
    else:
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=5000))  # asked for later
        assert "bytes are needed" in refused("--out", out, "--force")
    assert out.read_bytes() == content


def test_force_spares_a_shard_and_replaces_a_damaged_trace(prompts, out, loads, capsys):
    shutil.copy(TINY / "model.safetensors", out)
    assert trace("--prompts-file", prompts, "--out", out, "--force", *OPTIONS) == 2 and not loads
    assert "is no trace" in capsys.readouterr().err
    assert out.read_bytes() == (TINY / "model.safetensors").read_bytes()
    for name in ("one.safetensors", "one.safetensors.gz"):
        given = ("--prompts-file", prompts, "--out", out.with_name(name), *OPTIONS)
        assert trace(*given) == 0
        whole = out.with_name(name).read_bytes()
        out.with_name(name).write_bytes(whole[: len(whole) - 20])
        assert trace(*given, "--force") == 0
        assert (
            out.with_name(name).read_bytes()[:2] == whole[:2] and read_trace(out.with_name(name)).metadata["complete"]
        )


def test_a_trace_needs_a_place(prompts, capsys):
    assert trace("--prompts-file", prompts) == 2
    assert "the following arguments are required: --out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(out, refused, monkeypatch):
    def refuse(**arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert f"--out {out} cannot be written: Permission denied" in refused("--out", out)


def test_room_is_asked_for_beforehand(out, refused, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=5000))
    assert "bytes are needed and 5,000 available" in refused("--out", out)


def test_a_note_where_room_may_not_do(prompts, out, loads, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=50_000))
    assert trace("--prompts-file", prompts, "--out", out, *OPTIONS) == 0
    note = capsys.readouterr().err
    assert note.startswith(f"note: there may be too little room for {out}: if every token took a forward, ")
    assert "bytes are needed and 50,000 available" in note


def test_a_file_is_replaced_by_force_alone_and_at_the_end(prompts, out, loads, monkeypatch):
    assert trace("--prompts-file", prompts, "--out", out, "--weights", "uint8", *OPTIONS) == 0 and len(loads) == 1
    before = out.read_bytes()
    assert trace("--prompts-file", prompts, "--out", out, *OPTIONS) == 2 and len(loads) == 1
    with monkeypatch.context() as patch:
        interrupted_in(30, KeyboardInterrupt(), patch)
        assert trace("--prompts-file", prompts, "--out", out, "--force", *OPTIONS) == 130
    assert out.read_bytes() == before
    assert trace("--prompts-file", prompts, "--out", out, "--force", *OPTIONS) == 0
    assert read_trace(out).weights.dtype == np.float16


def test_progress(prompts, out, loads, monkeypatch, capsys):
    monkeypatch.setattr(command, "_LOG_SECONDS", 0)
    assert trace("--prompts-file", prompts, "--out", out, *OPTIONS) == 0
    lines = capsys.readouterr().err.splitlines()
    found = read_trace(out)
    assert len(lines) == len(set(found.forward.tolist()))
    assert lines[0].startswith("tracing: 0 of 4 prompts, 1 forward (")
    assert lines[-1].startswith(f"tracing: 3 of 4 prompts, {len(lines):,} forwards (")
    assert [sum(line.startswith(f"tracing: {done} of") for line in lines) > 0 for done in range(5)] == [True] * 4 + [
        False
    ]


@given(st.lists(st.sampled_from(["calibration", "evaluation", None]), min_size=1, max_size=20), st.integers(1, 5))
def test_batches_are_neighbours_of_one_split(splits, size):
    found = batches([SimpleNamespace(split=split) for split in splits], size)
    assert [place for places in found for place in places] == list(range(len(splits)))
    assert all(len({splits[place] for place in places}) == 1 and len(places) <= size for places in found)
    for before, after in itertools.pairwise(found):  # as large as they may be
        assert len(before) == size or splits[before[-1]] != splits[after[0]]
