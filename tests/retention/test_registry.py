"""Policies by name: what is read, what is refused and how it is told, and that none of it needs jax."""

import subprocess
import sys

import numpy as np
import pytest

from oled_jax import OledError
from oled_jax.retention import Table, policy_by_name, policy_names
from oled_jax.retention.frequency import Lfu, StaticFrequency
from oled_jax.retention.priority import Oled, Status
from oled_jax.retention.recency import Lru
from tests.retention.policies import POLICIES


def test_names_alone_give_the_defaults():
    assert policy_names() == (
        "ondemand",
        "lru",
        "fifo",
        "random",
        "lfu",
        "lfuda",
        "static-frequency",
        "oled",
        "status",
    )
    for name in policy_names():
        if name != "static-frequency":
            policy = policy_by_name(name)
            assert policy.name == policy.label == name
            assert policy.mode == ("select" if name == "status" else "protect")


def test_parameters_are_read():
    assert policy_by_name("lru:tie=load") == Lru(tie="load")
    assert policy_by_name(" lfu : weight = token , mode=select") == Lfu(weight="token", mode="select")
    assert policy_by_name("oled:w=one,rho_in=0.5,seed=3,tie=hash") == Oled(w="one", rho_in=0.5, seed=3, tie="hash")


WITHOUT_TABLES = [p for p in POLICIES.values() if not any(isinstance(value, Table) for value in vars(p).values())]


@pytest.mark.parametrize("policy", WITHOUT_TABLES, ids=lambda policy: policy.label)
def test_labels_read_back(policy):
    again = policy_by_name(policy.label)
    assert again == policy and hash(again) == hash(policy)


def test_tables_come_from_npy_files(tmp_path):
    for name, kind, parameter, array in (
        ("static-frequency", StaticFrequency, "counts", np.arange(6).reshape(2, 3)),
        ("oled:w=calibrated", Oled, "table", np.full((3, 10), 0.5)),
        ("status", Status, "successors", np.zeros((2, 5, 3), int)),
    ):
        path = tmp_path / f"{parameter}.npy"
        np.save(path, array)
        policy = policy_by_name(f"{name}{',' if ':' in name else ':'}{parameter}={path}")
        assert isinstance(policy, kind) and getattr(policy, parameter) == Table(array)
        assert policy_by_name(policy.label) == policy


def test_tables_are_compared_by_content_and_cannot_change():
    array = np.arange(6).reshape(2, 3)
    table = Table(array)
    array[0, 0] = 9
    assert table == Table(np.arange(6).reshape(2, 3)) and hash(table) == hash(Table(np.arange(6).reshape(2, 3)))
    assert table != Table(np.arange(6).reshape(3, 2)) and table != Table(array)
    with pytest.raises(ValueError, match="read-only"):
        table.array[0, 0] = 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mru", ["'mru'", "ondemand, lru, fifo, random, lfu, lfuda, static-frequency, oled, status"]),
        ("", ["unknown policy ''"]),
        ("lru:", ["''", "parameter=value"]),
        ("lru:tie", ["'tie'", "parameter=value"]),
        ("lru:ties=id", ["'ties'", "mode, tie, seed"]),
        ("lru:tie=first", ["'first'", "id, load, hash"]),
        ("random:tie=load", ["'tie'", "mode, seed"]),
        ("lru:tie=id,tie=load", ["tie is given twice"]),
        ("lru:seed=1.5", ["seed is '1.5'", "an integer from 0"]),
        ("oled:rho_in=1.5", ["rho_in is 1.5", "a number from 0 to 1"]),
        ("oled:rho_in=nan", ["rho_in is nan"]),
        ("oled:rho_in=-0.1", ["rho_in is -0.1"]),
        ("lfuda:cap=0", ["cap is 0", "from 1 to"]),
        ("oled:w=two,rho_in=x,colour=red", ["3 problems", "'two'", "identity, one, calibrated", "'x'", "'colour'"]),
        ("oled:w=calibrated", ["w is calibrated", "needs table"]),
        ("static-frequency", ["counts is missing"]),
        ("static-frequency:counts=/no/such.npy", ["/no/such.npy", "No such file"]),
    ],
)
def test_mistakes_are_told_in_one_error(text, says):
    with pytest.raises(OledError) as caught:
        policy_by_name(text)
    for words in says:
        assert words in str(caught.value)


def test_tables_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "text.npy").write_text("not an array")
    np.save(tmp_path / "names.npy", np.array(["a"]))
    np.save(tmp_path / "flat.npy", np.arange(3))
    for name, says in (("text", "cannot be read"), ("names", "array of numbers"), ("flat", "2 axes")):
        with pytest.raises(OledError, match=says):
            policy_by_name(f"static-frequency:counts={tmp_path / name}.npy")
    with pytest.raises(OledError, match=r"\[4, 10\]; it must be \[3, bins\]"):
        Oled(w="calibrated", table=Table(np.zeros((4, 10))))
    with pytest.raises(OledError, match="probabilities"):
        Oled(w="calibrated", table=Table(np.full((3, 10), 2.0)))
    with pytest.raises(OledError, match="w=calibrated only"):
        Oled(table=Table(np.zeros((3, 10))))
    with pytest.raises(OledError, match=r"counts has shape \[2, 3\].*\[2, 4\]"):
        StaticFrequency(counts=Table(np.zeros((2, 3)))).init(2, 4, 1, np)
    with pytest.raises(OledError, match=r"expert ids up to 9.*4 experts"):
        Status(successors=Table(np.full((2, 3, 1), 9))).init(2, 4, 1, np)


def test_wrong_types_in_python_are_told_alike():
    with pytest.raises(OledError, match=r"seed is '3'; it must be an integer"):
        Lru(seed="3")
    with pytest.raises(OledError, match=r"mode is 'keep'.*tie is None"):
        Lru(mode="keep", tie=None)


def test_the_laboratory_needs_numpy_alone():
    code = "import sys, oled_jax.retention; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
