"""The figures' numbers: by hand, against plain references, and as the command lines write them; no picture needed."""

import csv
import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from oled_jax.cli import main
from oled_jax.lab import Stream, Trace, read_trace, write_trace
from oled_jax.lab.overlap import by_gap
from oled_jax.lab.trace import PADDING
from tests.lab.traces import LAYERS, demands, random_trace

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "llada2-tiny-f32"
SCRIPTS = (
    "fig04_footprint",
    "fig07_overlap",
    "fig10_stability",
    "fig13_bounds",
    "fig16_batch_and_block",
    "table_capw",
)


@pytest.fixture
def module(monkeypatch):
    """Imports a script, as Python does when it runs one: its folder comes first."""
    monkeypatch.syspath_prepend(ROOT / "experiments" / "figures")
    return importlib.import_module


@pytest.fixture
def draws_nothing(monkeypatch):
    """Matplotlib is missing, imported before or not."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Two prompts of the golden model, recorded."""
    folder = tmp_path_factory.mktemp("golden")
    prompts, out = folder / "tasks.jsonl", folder / "run.safetensors.gz"
    lines = [
        {"prompt_ids": [1, 2, 3], "task": "a", "split": "calibration"},
        {"prompt_ids": [4, 5, 6, 7], "task": "b", "split": "evaluation"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--block-length", "8", "--gen-length", "16", "--threshold", "0.6", "--mask-id", "319", "--eos-id", "316"]
    given = ["--model", str(GOLDEN), "--prompts-file", str(prompts), "--out", str(out)]
    assert main(["trace", *given, *options]) == 0
    return out


def described(trace: Trace, **about) -> Trace:
    """With what a recorder knows."""
    decoding = {"threshold": about.pop("threshold", 0.9)}
    return dataclasses.replace(trace, metadata={"model": "made-up", "decoding": decoding, **about})


def numbers(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def measured(module, name: str, path: Path, *options: str) -> list[dict]:
    """The rows that a script makes of one trace, before they are written."""
    shared, script = module("shared"), module(name)
    (recorded,) = shared.read([str(path)])
    return script.FIGURE.measure(recorded, shared.parser_of(script.FIGURE).parse_args([str(path), *options]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_on_a_recorded_run(module, draws_nothing, golden, tmp_path, capsys, name):
    out = tmp_path / "new" / "figures"
    out.mkdir(parents=True)
    (out / f"{name}.png").write_bytes(b"of other numbers")
    assert module("shared").run(module(name).FIGURE, [str(golden), "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == [f"{name}.csv"]
    told = capsys.readouterr()
    trace = read_trace(golden)
    forwards = np.count_nonzero(trace.phase)
    working_set = np.count_nonzero(Stream(trace).counts, axis=-1).mean()
    expected = f"(llada2-tiny-f32, block 8, threshold 0.6, batch 1, n = 2 prompts and {forwards} decoding forwards, "
    assert f"{expected}W {working_set:.1f} of 16)" in told.out
    assert "matplotlib is missing" in told.err and told.err.splitlines()[-1].endswith(f"{name}.png")
    rows = numbers(out / f"{name}.csv")
    assert {(row["trace"], row["model"], row["prompts"]) for row in rows} == {("run", "llada2-tiny-f32", "2")}
    assert not any(cell in ("nan", "None", "inf") for row in rows for cell in row.values())
    again = tmp_path / "again"
    assert module("shared").run(module(name).FIGURE, [str(golden), "--out", str(again)]) == 0
    assert (again / f"{name}.csv").read_bytes() == (out / f"{name}.csv").read_bytes()


def test_a_split_alone(module, draws_nothing, golden, tmp_path, capsys):
    given = [str(golden), "--split", "evaluation", "--out", str(tmp_path)]
    assert module("shared").run(module("fig07_overlap").FIGURE, given) == 0
    assert "n = 1 prompt and" in (told := capsys.readouterr().out) and "evaluation split" in told
    rows = numbers(tmp_path / "fig07_overlap.csv")
    assert {row["prompts"] for row in rows} == {"1"}
    assert {row["recall_low"] for row in rows} == {""}  # one prompt has no interval


@pytest.mark.parametrize("name", SCRIPTS)
def test_pictures(module, golden, tmp_path, name):
    pytest.importorskip("matplotlib")
    assert module("shared").run(module(name).FIGURE, [str(golden), "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_footprint_by_hand(module, tmp_path):
    """One block of two positions in two forwards, the second of words alone; all three layers alike."""
    tokens = [[[0, 1, 2, 3], [0, 1, 4, 5]], [[0, 1, 2, 8], [0, 4, 5, 6]]]
    ids = np.broadcast_to(np.asarray(tokens, np.uint16)[:, None], (2, 3, 2, 4)).copy()
    config = json.loads((GOLDEN / "config.json").read_text())
    trace = Trace(
        num_experts=16,
        expert_ids=ids,
        weights=np.ones(ids.shape, np.float16),
        confidence=np.ones((2, 2), np.float16),
        tokens=np.zeros((2, 2), np.int32),
        status=np.asarray([[1, 1], [2, 2]], np.uint8),
        sequence=np.zeros(2, np.int32),
        block=np.zeros(2, np.int32),
        step=np.arange(2, dtype=np.int32),
        phase=np.asarray([1, 2], np.uint8),
        forward=np.arange(2, dtype=np.int32),
        metadata={"config": config},
    )
    write_trace(tmp_path / "t.safetensors", trace)
    rows = measured(module, "fig04_footprint", tmp_path / "t.safetensors")
    found = {row["quantity"]: (row["diffusion"], row["single_token_proxy"]) for row in rows}
    weights = 3 * 64 * 32  # of an expert
    script = module("fig04_footprint")
    assert found == {
        script.WANTED: (6.5, 4),
        script.BYTES: (3 * 6.5 * weights * 4, 3 * 4 * weights * 4),
        script.FLOPS: (3 * 8 * 2 * weights, 3 * 4 * 2 * weights),
        script.NEW: (2, 3),  # 6 and 8; and 4, 5 and 6
        script.BLOCK: (8, 7),
        script.TOKENS: (1, 1),
        script.BYTES_PER_TOKEN: (3 * 6.5 * weights * 4, 3 * 4 * weights * 4),
        script.FLOPS_PER_TOKEN: (3 * 8 * 2 * weights, 3 * 4 * 2 * weights),
    }


def test_overlap_of_prompts_together(module, tmp_path):
    """Looked at prompt by prompt, the means are those of the whole trace."""
    trace = random_trace(3, 60, prefill=True)
    write_trace(tmp_path / "t.safetensors", trace)
    rows = measured(module, "fig07_overlap", tmp_path / "t.safetensors")
    whole = by_gap(Stream(trace), 1)
    of = {row["layer"]: row for row in rows if (row["kind"], row["which"]) == ("gap", "1")}
    assert of.keys() == {"all", *range(LAYERS)}
    for name in ("jaccard", "recall", "cosine"):
        assert [of[layer][name] for layer in range(LAYERS)] == pytest.approx(getattr(whole, name).tolist())
        assert of["all"][name] == pytest.approx((getattr(whole, name) * whole.pairs).sum() / whole.pairs.sum())
    assert of["all"]["recall_low"] < of["all"]["recall"] < of["all"]["recall_high"]
    assert of["all"]["pairs"] == whole.pairs.sum()


def test_stability_against_plain_sets(module, tmp_path):
    """Positions without a confidence are in no bin, and in no total."""
    trace = random_trace(5, 80, prefill=True)
    unknown = np.random.default_rng(0).random(trace.confidence.shape) < 0.2
    trace = dataclasses.replace(trace, confidence=np.where(unknown, np.float16(-1), trace.confidence))
    write_trace(tmp_path / "t.safetensors", trace)
    rows = measured(module, "fig10_stability", tmp_path / "t.safetensors")
    kept: dict[tuple[int, int], list[float]] = {}
    for number in np.unique(trace.sequence):
        decoding = np.flatnonzero((trace.sequence == number) & (trace.phase > 0))
        for earlier, later in itertools.pairwise(decoding):
            for position, confidence in enumerate(trace.confidence[earlier].tolist()):
                ids = trace.expert_ids[[earlier, later], :, position]
                if trace.block[earlier] == trace.block[later] and PADDING not in ids and confidence >= 0:
                    shares = [len(set(a) & set(b)) / len(a) for a, b in zip(*ids.tolist(), strict=True)]
                    kept.setdefault((trace.status[earlier, position], int(10 * confidence)), []).extend(shares)
    cases = 0
    for code, status in enumerate(("masked", "just committed", "settled")):
        mine = [row for row in rows if row.get("status") == status]
        bins = [row for row in mine if row["kind"] == "stability"]
        assert len(bins) == 10 and sum(row["share_of_status"] for row in bins) == pytest.approx(1)
        for place, row in enumerate(bins):
            found = kept.get((code, place), [])
            assert row["positions"] * LAYERS == len(found)
            if found:
                assert row["kept"] == pytest.approx(np.mean(found))
                cases += 1
        (total,) = (row for row in mine if row["kind"] == "stability of a status")
        assert total["kept"] == pytest.approx(
            np.mean([share for place in range(10) for share in kept.get((code, place), [])])
        )
        assert total["kept_low"] <= total["kept"] <= total["kept_high"]
    assert cases > 20
    ratios = [row["activation_ratio"] for row in rows if row["kind"] == "activation"]
    counts = Stream(trace).counts
    assert ratios == pytest.approx([np.mean(np.any(counts[:, layer, :, None], axis=-1)) for layer in range(LAYERS)])


def test_table_by_hand(module, draws_nothing, tmp_path, capsys):
    """Two pairs of experts take turns. With two slots LRU never hits; the bound keeps one pair for its next turn."""
    trace = described(demands((0, 1), (2, 3), (0, 1), (2, 3), experts=8), model="by hand", threshold=0.5)
    write_trace(tmp_path / "t.safetensors", trace)
    given = [str(tmp_path / "t.safetensors"), "--out", str(tmp_path), "--policies", "lru,tide,min-bypass"]
    assert module("shared").run(module("table_capw").FIGURE, given) == 0
    rows = {(row["policy"], row["target"]): row for row in numbers(tmp_path / "table_capw.csv")}
    slots = {target: rows["lru", target]["capacity"] for _, target in rows}
    assert slots == {"0.43": "1", "0.6": "1", "0.83": "2", "1": "2", "1.3": "3", "1.73": "3"}
    lru, bound = rows["lru", "1"], rows["min-bypass", "1"]
    assert (lru["misses"], lru["misses_per_request"], lru["gap_closure"]) == ("8", "1", "0")
    assert (bound["misses"], bound["misses_vs_lru"], bound["gap_closure"]) == ("6", "-0.25", "1")
    assert (lru["start"], rows["tide", "1"]["start"]) == ("empty", "filled")
    assert lru["gap_closure_low"] == ""  # one prompt
    told = capsys.readouterr().out
    assert "lru at 0.43" in told and "min-bypass at" not in told and "tide*" in told
    (cells,) = (line.split() for line in told.splitlines() if line.startswith("min-bypass"))
    assert cells[1:] == [f"{int(rows['min-bypass', target]['misses']) / 4:.2f}" for target in slots]


def test_capacities_beyond_the_experts_are_left_out(module, draws_nothing, tmp_path, capsys):
    write_trace(tmp_path / "t.safetensors", demands((0, 1), (1, 2), (0, 1, 2), experts=3))
    given = [str(tmp_path / "t.safetensors"), "--out", str(tmp_path), "--policies", "lru"]
    assert module("shared").run(module("table_capw").FIGURE, given) == 0
    targets = {row["target"] for row in numbers(tmp_path / "table_capw.csv")}
    assert targets == {"0.43", "0.6", "0.83", "1", "1.3"}
    assert "1.73 W would be more than there are experts" in capsys.readouterr().out


def test_misses_are_those_of_the_command(module, golden, capsys):
    """Capacities aside, a figure's rows are what ``oled-jax replay`` prints."""
    rows = measured(module, "fig13_bounds", golden, "--policies", "oled,last-step", "--ties")
    capacities = sorted({row["capacity"] for row in rows})
    given = ["--policies", "oled,last-step", "--ties", "--intervals", "--json"]
    assert main(["replay", str(golden), "--capacity", ",".join(map(str, capacities)), *given]) == 0
    replayed = {(one["policy"], one["capacity"]): one for one in json.loads(capsys.readouterr().out)}
    assert {(row["policy"], row["capacity"]) for row in rows} == replayed.keys()
    working_set = np.count_nonzero(Stream(read_trace(golden)).counts, axis=-1).mean()
    for row in rows:
        one = replayed[row["policy"], row["capacity"]]
        for name in ("misses", "requests", "gap_closure", "speculative_loads", "u_ideal"):
            assert row[name] == one[name]
        interval = one["intervals"]["misses_vs_lru"]
        assert row["misses_vs_lru"] == pytest.approx(interval["estimate"])
        assert (row["misses_vs_lru_low"], row["misses_vs_lru_high"]) == (interval["low"], interval["high"])
        assert abs(row["target"] * working_set - row["capacity"]) <= 0.5


def test_batches_and_blocks(module, draws_nothing, golden, tmp_path, capsys):
    """Times are those of ``oled-jax replay --machine``, and nothing else is called simulated."""
    rows = measured(module, "fig16_batch_and_block", golden, "--policy", "lru")
    assert [row["capacity"] for row in rows] == [2, 4, 6, 8]
    given = ["--policies", "lru", "--capacity", "2,4,6,8", "--machine", "rtx5090", "--json"]
    assert main(["replay", str(golden), *given]) == 0
    for row, one in zip(rows, json.loads(capsys.readouterr().out), strict=True):
        for name in ("simulated_tpot_ms", "simulated_step_ms", "u_ideal", "tokens_per_forward", "machine"):
            assert row[name] == one[name]
        assert row["activation_ratio"] == one["working_set"] / 16


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("fig07_overlap", ["{t}/nowhere.safetensors"], "cannot be read"),
        ("fig07_overlap", ["{t}/a.safetensors", "{t}/a.safetensors"], "two traces are called 'a'"),
        ("fig07_overlap", ["{t}/a.safetensors", "--out", "{t}/a.safetensors"], "cannot be made a folder"),
        ("fig07_overlap", ["{t}/a.safetensors", "--split", "evaluation"], "the splits it tells of: none"),
        ("fig07_overlap", ["{t}/prompt.safetensors"], "holds no decoding forwards, only prefill"),
        ("fig07_overlap", [], "the following arguments are required: TRACE"),
        ("fig07_overlap", ["{t}/text.safetensors"], "no safetensors file"),
        ("fig13_bounds", ["{t}/a.safetensors", "--policies", "lru,best"], "unknown policy 'best'"),
        ("fig04_footprint", ["{t}/a.safetensors"], "does not tell of its model's sizes"),
        ("fig04_footprint", ["{t}/batch.safetensors"], "has batches of 2"),
        ("fig04_footprint", ["{t}/other.safetensors"], "of another geometry"),
        ("fig16_batch_and_block", ["{t}/a.safetensors", "{t}/b.safetensors"], "differ in threshold (0.5, 0.9)"),
        ("fig16_batch_and_block", ["{t}/b.safetensors", "{t}/c.safetensors"], "2 traces are of block length 3 and"),
        ("fig16_batch_and_block", ["{t}/other.safetensors", "--machine", "abacus"], "unknown machine 'abacus'"),
    ],
)
def test_a_mistake_is_one_line(module, draws_nothing, tmp_path, capsys, name, given, told):
    config = json.loads((GOLDEN / "config.json").read_text())
    single = random_trace(1, 8, batch=1)
    for file, trace in {
        "a": described(single),
        "b": described(single, threshold=0.5),
        "c": described(single, threshold=0.5),
        "batch": described(random_trace(1, 8, batch=2), config=config),
        "other": described(single, config=config),
        "prompt": dataclasses.replace(single, phase=np.zeros(len(single.phase), np.uint8)),
    }.items():
        write_trace(tmp_path / f"{file}.safetensors", trace)
    (tmp_path / "text.safetensors").write_text("no trace")
    given = [part.format(t=tmp_path) for part in given]
    given += [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert module("shared").run(module(name).FIGURE, given) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith(f"{name}: error: ") and told in printed.err
    assert not list(tmp_path.rglob("*.csv")) and not list(tmp_path.rglob("*.tmp"))
