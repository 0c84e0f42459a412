"""``oled-jax replay``: the table, JSON and CSV, and a user's mistakes."""

import csv
import dataclasses
import io
import json

import numpy as np
import pytest

from oled_jax.cli import main
from oled_jax.lab import Stream, gap_closure, replay, rule_by_name, write_trace
from oled_jax.lab.machine import machine_names, read_machine
from oled_jax.lab.statistics import bootstrap, by_unit, change
from oled_jax.lab.timeline import Setup
from tests.lab.machines import CONFIG
from tests.lab.traces import EXPERTS, LAYERS, demands, random_trace

TRACE = random_trace(0, 40, prefill=True)
NUMBERS = np.unique(TRACE.sequence).tolist()
# Batches of two sequences: all of a batch in one split and one task.
SEQUENCES = [
    {
        "sequence": number,
        "task": "sort" if number // 2 % 2 else "copy",
        "split": "calibration" if number < 8 else "evaluation",
        "generated_tokens": 3,
    }
    for number in NUMBERS
]
DESCRIBED = dataclasses.replace(TRACE, metadata={"config": CONFIG.to_hf(), "sequences": SEQUENCES})


@pytest.fixture
def path(tmp_path):
    write_trace(tmp_path / "run.safetensors.gz", TRACE)
    return tmp_path / "run.safetensors.gz"


@pytest.fixture
def described(tmp_path):
    """The same, and it tells of its model, tasks and splits."""
    write_trace(tmp_path / "described.safetensors", DESCRIBED)
    return tmp_path / "described.safetensors"


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


def test_csv_of_tasks_and_intervals(described, out):
    arguments = (described, "--policies", "oled", "--capacity", "3", "--include-prefill", "--by-task", "--intervals")
    rows = list(csv.DictReader(io.StringIO(out(*arguments, "--csv"))))
    objects = json.loads(out(*arguments, "--json"))
    assert [row["task"] for row in rows] == ["", "copy", "sort"]
    for row, each in zip(rows, objects, strict=True):
        assert None not in row and float(row["misses_vs_lru_low"]) == each["intervals"]["misses_vs_lru"]["low"]
        assert row["gap_closure_units"] == str(each["intervals"]["gap_closure"]["units"])
    assert [row["prefill_misses"] == "" for row in rows] == [False, True, True]


def test_table(path, out):
    lines = out(path, "--capacity", "3,8").splitlines()
    stream = Stream(TRACE)
    requests = np.count_nonzero(stream.counts)
    assert lines[0].startswith(f"{len(stream)} decoding forwards, {LAYERS} layers of {EXPERTS} experts, {requests:,}")
    rows = [line.split() for line in lines[3:]]
    assert [row[:2] for row in rows] == [[name, c] for name in ("lru", "oled", "min-bypass") for c in ("3", "8")]
    assert [row[-1] for row in rows[-2:]] == ["1.000", "-"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_prefetching(path, out):
    arguments = (path, "--policies", "last-step,oled:w=one+last-step,moe-infinity,oracle-next", "--capacity", "2")
    found = json.loads(out(*arguments, "--json"))
    assert [each["policy"] for each in found] == ["last-step", "oled:w=one+last-step", "moe-infinity", "oracle-next"]
    stream = Stream(TRACE)
    for each, alone in zip(found, ("lru", "oled:w=one", "moe-infinity-lfu", "lru"), strict=True):
        counters = replay(stream, rule_by_name(each["policy"]), 2).decode
        assert each["speculative_loads"] == sum(counters.speculative) > 0
        assert each["speculative_used"] + each["speculative_wasted"] == each["speculative_loads"]
        assert each["speculative_precision"] == each["speculative_used"] / each["speculative_loads"]
        saved = sum(replay(stream, rule_by_name(alone), 2).decode.misses) - each["misses"]
        assert each["avoided_per_speculative"] == saved / each["speculative_loads"]
    heading = out(*arguments).splitlines()[2]
    assert "speculative  used" in heading and "sim." not in heading


def test_ties_below_the_working_set(path, out):
    found = json.loads(out(path, "--policies", "lru,lru:tie=load,ondemand", "--capacity", "2,8", "--ties", "--json"))
    expected = ["lru", "lru:tie=load", "lru:tie=hash", "ondemand"]
    assert [each["policy"] for each in found if each["capacity"] == 2] == expected
    assert [each["policy"] for each in found if each["capacity"] == 8] == ["lru", "lru:tie=load", "ondemand"]
    assert Stream(TRACE).counts.astype(bool).sum(-1).mean() < 8


def test_splits_and_tasks(described, out):
    (found,) = json.loads(out(described, "--policies", "lru", "--capacity", "3", "--split", "evaluation", "--json"))
    chosen = DESCRIBED.select(entry["sequence"] for entry in SEQUENCES if entry["split"] == "evaluation")
    assert found["misses"] == sum(replay(Stream(chosen), rule_by_name("lru"), 3).decode.misses)
    assert "task" not in found
    whole, copy, sort = json.loads(out(described, "--policies", "lru", "--capacity", "3", "--by-task", "--json"))
    assert (whole["task"], copy["task"], sort["task"]) == (None, "copy", "sort")
    assert whole["misses"] == copy["misses"] + sort["misses"] and copy["misses"] > 0
    assert whole["forwards"] == copy["forwards"] + sort["forwards"]
    table = out(described, "--policies", "lru", "--capacity", "3", "--by-task").splitlines()
    assert [line.split()[1] for line in table[2:]] == ["task", "all", "copy", "sort"]


def test_prefetchers_may_study_the_other_split(described, out):
    arguments = (
        described,
        "--policies",
        "commit-ahead:theta=0.2,lru",
        "--capacity",
        "3",
        "--split",
        "evaluation",
        "--json",
    )
    cold, studied = json.loads(out(*arguments)), json.loads(out(*arguments, "--study", "calibration"))
    streams = [
        Stream(DESCRIBED.select(entry["sequence"] for entry in SEQUENCES if entry["split"] == split))
        for split in ("evaluation", "calibration")
    ]
    rule = rule_by_name("commit-ahead:theta=0.2")
    expected = replay(streams[0], rule, 3, study=streams[1]).decode
    assert studied[0]["misses"] == sum(expected.misses)
    assert studied[0]["speculative_loads"] == sum(expected.speculative) != cold[0]["speculative_loads"]
    assert studied[1] == cold[1]


def test_unequal_budgets(path, out):
    found = json.loads(out(path, "--capacity", "3", "--policies", "lru,min-bypass", "--budget", "ratio", "--json"))
    wanted = Stream(TRACE).counts.astype(bool).sum(-1).mean(0)
    for each in found:
        slots = each["layers"]["slots"]
        assert sum(slots) == 3 * LAYERS and each["budget"] == "ratio" and each["capacity"] == 3
        assert np.argmax(slots) == np.argmax(wanted) or slots == [3] * LAYERS
    assert found[0]["misses"] >= found[1]["misses"]


def test_intervals(described, out):
    arguments = (described, "--policies", "oled,min-bypass", "--capacity", "3", "--intervals", "--json")
    found = json.loads(out(*arguments))
    stream = Stream(TRACE)
    misses = [replay(stream, rule_by_name(name), 3).misses_by_forward() for name in ("oled", "lru")]
    expected = bootstrap(by_unit(stream, np.stack(misses, axis=-1)), change)
    assert found[0]["intervals"]["misses_vs_lru"] == expected._asdict()
    assert expected.units == len(set(stream.batches[~stream.prefill]))
    assert found[1]["intervals"]["gap_closure"] == {"estimate": 1, "low": 1, "high": 1, "units": expected.units}
    assert json.loads(out(*arguments, "--seed", "1"))[0]["intervals"] != found[0]["intervals"]
    apart = json.loads(out(*arguments, "--by-task"))
    assert apart[1]["intervals"]["misses_vs_lru"]["units"] + apart[2]["intervals"]["misses_vs_lru"]["units"] == (
        expected.units
    )
    assert "misses vs lru" in out(*arguments[:-1])


def test_simulated_time(described, out):
    arguments = (described, "--policies", "lru,oracle-next:timed=true", "--capacity", "3", "--machine", "rtx5090")
    found = json.loads(out(*arguments, "--json"))
    setup = Setup(read_machine("rtx5090"), CONFIG)
    stream = Stream(TRACE)
    for each in found:
        times = replay(stream, rule_by_name(each["policy"]), 3, setup=setup).times
        assert each["machine_source"] == "public figures" and each["dispatch"] == "all-device"
        assert each["simulated_step_ms"] == pytest.approx(1e3 * times.step.mean())
        assert each["generated_tokens"] == 3 * len(NUMBERS)
        assert each["simulated_tpot_ms"] == pytest.approx(1e3 * times.step.sum() / each["generated_tokens"])
        assert not {"tpot_ms", "tpot"} & set(each)
    assert found[1]["simulated_step_ms"] <= found[0]["simulated_step_ms"]
    slower = json.loads(out(*arguments, "--link-slowdown", "8", "--json"))
    assert slower[0]["simulated_step_ms"] > found[0]["simulated_step_ms"] and slower[0]["misses"] == found[0]["misses"]
    table = out(*arguments)
    assert "times simulated for rtx5090 (public figures), dispatch all-device" in table and "sim. TPOT" in table


def test_host_dispatch(described, out):
    arguments = (described, "--policies", "lru", "--capacity", "3", "--machine", "h200", "--link-slowdown", "30")
    (found,) = json.loads(out(*arguments, "--dispatch", "fiddler", "--json"))
    assert found["host_runs"] > 0 and found["loads"] + found["host_runs"] == found["misses"]
    assert found["gap_closure"] is None and found["activation_bytes"] > 0
    rows = list(csv.DictReader(io.StringIO(out(*arguments, "--dispatch", "fiddler", "--csv"))))
    assert float(rows[0]["simulated_tpot_ms"]) == found["simulated_tpot_ms"]


def test_the_model_may_be_named(path, described, out, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    arguments = ("--policies", "lru", "--capacity", "3", "--machine", "a5000", "--json")
    (named,) = json.loads(out(path, *arguments, "--model", tmp_path / "config.json"))
    (told,) = json.loads(out(described, *arguments))
    assert named["simulated_step_ms"] == told["simulated_step_ms"]


def test_the_model_may_be_a_preset_of_the_same_geometry(tmp_path, out):
    trace = random_trace(0, 4, batch=1, layers=19, experts=256)
    write_trace(tmp_path / "mini", trace)
    (found,) = json.loads(out(tmp_path / "mini", "--policies", "lru", "--capacity", "9", "--machine", "h200", "--json"))
    assert found["expert_bytes"] == 3 * 2048 * 512 * 2  # LLaDA2.0-mini's, in bfloat16


def test_policies_from_a_file(path, out, tmp_path):
    (tmp_path / "p.toml").write_text('[[policy]]\nname = "oled"\nw = "one"\n\n[[policy]]\nname = "fifo"\n')
    both = ("--policies", "fifo,lru", "--policy-file", tmp_path / "p.toml")
    found = json.loads(out(path, *both, "--capacity", "3", "--json"))
    assert [each["policy"] for each in found] == ["fifo", "lru", "oled:w=one"]
    found = json.loads(out(path, "--policy-file", tmp_path / "p.toml", "--capacity", "3", "--json"))
    assert [each["policy"] for each in found] == ["oled:w=one", "fifo"]


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
        (("--capacity", "3", "--policies", "lru+ahead"), "unknown prefetcher 'ahead': the prefetchers are last-step"),
        (("--capacity", "3", "--policies", "belady+last-step"), "takes no prefetcher; a retention policy does"),
        (("--capacity", "3", "--policies", "oracle-next:timed=true"), "needs a machine to be timed on (--machine)"),
        (("--capacity", "3", "--split", "evaluation"), "has no sequence in it; the splits that it tells of: none"),
        (("--capacity", "3", "--study", "evaluation"), "--study evaluation: trace"),
        (
            ("--capacity", "3", "--split", "evaluation", "--study", "evaluation"),
            "--study evaluation: these are the prompts that are replayed; study the others",
        ),
        (("--capacity", "1", "--budget", "ratio"), "2 slots cannot be shared out over 2 layers with 2 to 8 each"),
        (("--capacity", "3", "--by-task"), "tells of no tasks; record it with prompts that have them"),
        (("--capacity", "3", "--seed", "-1"), "--seed is -1: give a number that is not negative"),
        (("--capacity", "3", "--dispatch", "oled"), "--dispatch needs --machine, whose times it goes by"),
        (("--capacity", "3", "--link-slowdown", "2"), "--link-slowdown needs --machine"),
        (
            ("--capacity", "3", "--machine", "pc"),
            f"unknown machine 'pc': the machines are {', '.join(machine_names())}",
        ),
        (("--capacity", "3", "--machine", "h200", "--dispatch", "best"), "unknown dispatch rule 'best': the dispatch"),
        (("--capacity", "3", "--machine", "h200", "--link-slowdown", "0"), "a link can be made 1 to 1000 times slower"),
        (("--capacity", "3", "--machine", "h200"), "does not tell of its model: name it (--model PRESET or a config"),
        (("--capacity", "3", "--machine", "h200", "--model", "mini"), "--model 'mini' is neither a file nor a preset"),
        (
            ("--capacity", "3", "--machine", "h200", "--model", "llada2.0-mini"),
            "has 2 layers of 8 experts, but the model has 19 of 256",
        ),
        (("--capacity", "3", "--policy-file", "absent.toml"), "absent.toml cannot be read: No such file"),
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


def test_paths_without_a_name(path, refused):
    assert "TRACE is empty: give the path of a trace file" in refused("", "--capacity", 3)
    assert "the path of the file of policies is empty" in refused(path, "--capacity", 3, "--policy-file", "")
    named = ("--machine", "h200", "--model", "")
    assert "--model '' is neither a file nor a preset" in refused(path, "--capacity", 3, *named)
