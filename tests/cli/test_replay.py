"""``oled-jax replay``: the table, JSON and CSV, and a user's mistakes."""

import csv
import io
import json

import numpy as np
import pytest

from oled_jax.cli import main
from oled_jax.lab import Stream, gap_closure, replay, rule_by_name, write_trace
from tests.lab.traces import EXPERTS, LAYERS, demands, random_trace

TRACE = random_trace(0, 40, prefill=True)


@pytest.fixture
def path(tmp_path):
    write_trace(tmp_path / "run.safetensors.gz", TRACE)
    return tmp_path / "run.safetensors.gz"


@pytest.fixture
def out(capsys):
    """Runs the command, which must end well and say nothing on standard error; its output."""

    def run(*arguments):
        assert main(["replay", *map(str, arguments)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def refused(capsys):
    """Runs the command, which must fail as a user's mistake does; what it says."""

    def run(*arguments):
        assert main(["replay", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("oled-jax: error: ") and err.count("\n") == 1, err
        return err

    return run


def test_json_has_one_object_per_policy_and_capacity(path, out):
    policies = ("--policies", "oled:w=one,rho_in=0.5,lru", "--policies", "min-bypass")
    text = out(path, *policies, "--capacity", "3,5", "--json")
    found = json.loads(text)
    labels = ["oled:w=one,rho_in=0.5", "lru", "min-bypass"]
    assert [(each["policy"], each["capacity"]) for each in found] == [(p, c) for p in labels for c in (3, 5)]
    stream = Stream(TRACE)
    for each in found:
        counters = replay(stream, rule_by_name(each["policy"]), each["capacity"]).decode
        lru, bound = (
            sum(replay(stream, rule_by_name(name), each["capacity"]).decode.misses) for name in ("lru", "min-bypass")
        )
        assert (each["requests"], each["hits"]) == (sum(counters.requests), sum(counters.hits))
        assert each["misses"] == each["loads"] == sum(counters.misses)
        assert each["speculative_loads"] == 0 and each["prefill"] is None
        assert each["gap_closure"] == gap_closure(each["misses"], lru, bound, each["requests"])
    assert [each["gap_closure"] for each in found[2:]] == [0, 0, 1, 1]
    assert out(path, *policies, "--capacity", "3,5", "--json") == text


def test_the_yardsticks_need_not_be_asked_for(path, out):
    (alone,) = json.loads(out(path, "--policies", "oled", "--capacity", 3, "--json"))
    among = json.loads(out(path, "--policies", "lru,oled,min-bypass", "--capacity", 3, "--json"))
    assert alone == among[1] and isinstance(alone["gap_closure"], float)


def test_prefill_stands_apart(path, out):
    (found,) = json.loads(out(path, "--policies", "lru", "--capacity", 3, "--include-prefill", "--json"))
    prefill = replay(Stream(TRACE, include_prefill=True), rule_by_name("lru"), 3).prefill
    assert found["prefill"]["forwards"] == prefill.forwards > 0
    assert found["prefill"]["misses"] == sum(prefill.misses)
    assert found["forwards"] == len(Stream(TRACE))
    table = out(path, "--capacity", 3, "--include-prefill")
    assert f"{prefill.forwards} forwards of prefill" in table


def test_csv(path, out):
    arguments = (path, "--policies", "lru,oled:w=one,rho_in=0.5", "--capacity", "3,8", "--include-prefill")
    rows = list(csv.DictReader(io.StringIO(out(*arguments, "--csv"))))
    objects = json.loads(out(*arguments, "--json"))
    assert len(rows) == len(objects) == 4
    for row, each in zip(rows, objects, strict=True):
        assert row["policy"] == each["policy"]
        assert row["gap_closure"] == ("" if each["gap_closure"] is None else str(each["gap_closure"]))
        assert int(row["misses"]) == each["misses"]
        assert int(row["prefill_misses"]) == each["prefill"]["misses"]
    assert rows[1]["gap_closure"] == ""  # room for all experts: nothing to close


def test_table(path, out):
    lines = out(path, "--capacity", "3,8").splitlines()
    stream = Stream(TRACE)
    requests = np.count_nonzero(stream.counts)
    assert lines[0].startswith(f"{len(stream)} decoding forwards, {LAYERS} layers of {EXPERTS} experts, {requests:,}")
    rows = [line.split() for line in lines[3:]]
    assert [row[:2] for row in rows] == [[name, c] for name in ("lru", "oled", "min-bypass") for c in ("3", "8")]
    assert [row[-1] for row in rows[-2:]] == ["1.000", "-"]
    assert len({len(line) for line in lines[2:]}) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the following arguments are required: --capacity"),
        (
            ("--capacity", "9"),
            f"--capacity 9: the layers of this trace have {EXPERTS} experts each; give 1 to {EXPERTS}",
        ),
        (("--capacity", "0,3,10"), "--capacity 0, 10: the layers"),
        (("--capacity", "3,"), "--capacity '3,': give numbers of slots"),
        (("--capacity=-3",), "--capacity '-3': give numbers of slots"),
        (("--capacity", "40%"), "--capacity '40%': give numbers of slots"),
        (
            ("--capacity", "3", "--policies", "best"),
            "--policies: unknown policy 'best': the policies are ondemand, lru",
        ),
        (("--capacity", "3", "--policies", "lru,"), "--policies: unknown policy ''"),
        (("--capacity", "3", "--policies", "oled:x=1"), "it has no parameter 'x'; its parameters are"),
        (
            ("--capacity", "3", "--policies", "best,lru", "--policies", "belady:tie=id"),
            "--policies: 2 problems: unknown policy 'best'",
        ),
        (("--capacity", "3", "--json", "--csv"), "not allowed with argument"),
    ],
)
def test_mistakes(path, refused, arguments, expected):
    assert expected in refused(path, *arguments)


def test_files_that_are_no_trace(tmp_path, refused):
    assert "cannot be read: No such file" in refused(tmp_path / "absent", "--capacity", 3)
    (tmp_path / "text").write_text("a text")
    assert "text is no safetensors file" in refused(tmp_path / "text", "--capacity", 3)


def test_a_table_of_another_model(tmp_path, path, refused):
    np.save(tmp_path / "counts.npy", np.ones((LAYERS, EXPERTS + 1), int))
    policy = f"static-frequency:counts={tmp_path / 'counts.npy'}"
    assert "but the model has 2 layers of 8 experts" in refused(path, "--capacity", 3, "--policies", policy)


def test_nothing_but_prefill(tmp_path, refused):
    trace = demands((0, 1), experts=4)
    trace.phase[:] = 0
    write_trace(tmp_path / "a", trace)
    assert "holds no decoding forwards, only prefill: include that (--include-prefill)" in refused(
        tmp_path / "a", "--capacity", 2
    )
