"""Recording a trained model's traces with one command, and the core set that the repository holds."""

from pathlib import Path

import numpy as np
import traces

from oled_jax.lab import read_trace

CORE = Path(traces.__file__).parents[1] / "traces"


def test_records_what_is_missing(tmp_path, capsys):
    command = ["--model", "demo", "--out", str(tmp_path), "--core", "--tasks", "add,count", "--count", "1"]
    assert traces.main(command) == 0
    (path,) = tmp_path.iterdir()
    trace = read_trace(path)
    assert list(trace.tasks.values()) == ["add", "count"]
    assert list(trace.splits.values()) == ["calibration", "evaluation"]
    capsys.readouterr()
    assert traces.main(command) == 0
    assert "kept" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path, capsys):
    assert traces.main(["--model", "demo", "--out", str(tmp_path), "--tasks", "juggle"]) == 2
    assert "juggle" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_core_set_is_small_and_of_both_splits():
    paths = list(CORE.glob("*.safetensors.gz"))
    assert paths
    assert sum(path.stat().st_size for path in paths) <= 20 * 10**6
    for path in paths:
        trace = read_trace(path)
        assert set(trace.splits.values()) == {"calibration", "evaluation"}
        tasks, prompts = np.unique(list(trace.tasks.values()), return_counts=True)
        assert len(tasks) >= 5
        assert prompts.min() >= 8
