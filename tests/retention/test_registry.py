"""Policies by name: what is read, what is refused and how it is told, and that none of it needs jax."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oled_jax import OledError
from oled_jax.retention import Table, policies_from_toml, policy_by_name, policy_names
from oled_jax.retention.frequency import Lfu, StaticFrequency
from oled_jax.retention.priority import Oled, Status
from oled_jax.retention.recency import Lru
from tests.retention.policies import POLICIES
from tests.retention.streams import make_stream, outcomes

NEEDS_COUNTS = {"static-frequency", "fiddler"}
SELECTING = {"status", "tide", "interval", "tide-paper", "mixtral-tide"}


def test_names_alone_give_the_defaults():
    assert policy_names() == (
        *("ondemand", "lru", "fifo", "random", "lfu", "lfu-incache", "lfru", "lfuda", "lfuda-conf", "s3fifo"),
        *("static-frequency", "static-uniform", "static-front", "static-block"),
        *("tide", "interval", "tide-paper", "mixtral-tide", "mixtral-lru", "hybrimoe", "fiddler", "dali", "freetoken"),
        *("oled", "oled-steps", "boundary", "status"),
    )
    for name in set(policy_names()) - NEEDS_COUNTS:
        policy = policy_by_name(name)
        assert policy.name == policy.label == name
        assert policy.mode == ("select" if name in SELECTING else "protect")


@pytest.mark.parametrize("name", [*policy_names()])
def test_every_number_and_word_can_be_given_and_read_back(name, tmp_path):
    """Each parameter in turn, at another value than its default, on its own."""
    np.save(tmp_path / "counts.npy", np.ones((2, 3)))
    base = [f"counts={tmp_path / 'counts.npy'}"] if name in NEEDS_COUNTS else []
    defaults = policy_by_name(f"{name}:{','.join(base)}" if base else name)
    for field in dataclasses.fields(defaults):
        value = getattr(defaults, field.name)
        if "axes" in field.metadata or (field.name, name) == ("w", "oled"):
            continue
        if "choices" in field.metadata:
            other = next(word for word in field.metadata["choices"] if word not in (value, "calibrated"))
        else:
            other = (
                type(value)(field.metadata["low"] + 1) if value != field.metadata["low"] + 1 else field.metadata["low"]
            )
        given = policy_by_name(f"{name}:{','.join([*base, f'{field.name}={other}'])}")
        assert getattr(given, field.name) == other != value
        assert policy_by_name(given.label) == given and given != defaults


def test_published_names_decide_as_what_they_keep():
    assert isinstance(policy_by_name("mixtral-lru"), Lru) and isinstance(policy_by_name("freetoken:tie=load"), Lru)
    stream = make_stream(0, 20)
    for name, same in (("mixtral-lru", "lru"), ("freetoken", "lru"), ("interval:tau=3", "tide:tau=3")):
        pairs = zip(*(outcomes(policy_by_name(text), stream, 9) for text in (name, same)), strict=True)
        assert all((ours.resident == theirs.resident).all() for ours, theirs in pairs)


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
        (
            "mru",
            ["'mru'", "ondemand, lru, fifo, random, lfu, lfu-incache", "mixtral-tide", "oled, oled-steps, boundary"],
        ),
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
        ("fiddler", ["policy fiddler", "counts is missing"]),
        ("tide:tau=0", ["tau is 0", "an integer from 1"]),
        ("mixtral-tide:tau=2", ["'tau'", "mode, tie, seed"]),
        ("oled:aggregation=mean", ["'mean'", "sum, noisy-or, max"]),
        ("oled-steps:rho_r=0", ["rho_r is 0", "from 0.01"]),
        ("boundary:base=status", ["'status'", "lru, oled"]),
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


def test_policies_from_toml(tmp_path):
    np.save(tmp_path / "counts.npy", np.arange(6).reshape(2, 3))
    (tmp_path / "list.toml").write_text(
        """
        [[policy]]
        name = "lru"
        [[policy]]
        name = "oled"
        w = "one"
        rho_in = 1          # a whole number will do
        seed = 3
        [[policy]]
        name = "static-frequency"
        counts = "counts.npy"
        """
    )
    lru, oled, static = policies_from_toml(tmp_path / "list.toml")
    assert lru == Lru() and oled == Oled(w="one", rho_in=1.0, seed=3)
    assert static.counts == Table(np.arange(6).reshape(2, 3))
    assert [policy_by_name(policy.label) for policy in (lru, oled, static)] == [lru, oled, static]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["1 problem", "it lists no policies"]),
        ("policy = 3", ["it lists no policies"]),
        ("[policy]\nname = 'lru'", ["it lists no policies", "[[policy]]"]),
        ("[[policy]]\nname = 'lru'\n[table]\nx = 1", ["it holds 'table'"]),
        ("[[policy]]\ntie = 'id'", ["policy 1 (without a name): unknown policy None", "ondemand, lru"]),
        ("[[policy]]\nname = 'mru'", ["policy 1 (mru): unknown policy 'mru': the policies are ondemand"]),
        (
            "[[policy]]\nname = 'lru'\n[[policy]]\nname = 'lru'\nties = 1",
            ["policy 2 (lru)", "'ties'", "mode, tie, seed"],
        ),
        ("[[policy]]\nname = 'lru'\ntie = ['id']", ["tie is ['id']", "id, load, hash"]),
        ("[[policy]]\nname = 'lru'\nseed = true", ["seed is True", "an integer from 0"]),
        ("[[policy]]\nname = 'lfuda'\ncap = 1.5\nghost = 2", ["2 problems", "cap is 1.5", "ghost is 2.0"]),
        ("[[policy]]\nname = 'oled'\nw = 'calibrated'", ["policy 1 (oled)", "needs table"]),
        ("[[policy]]\nname = 'fiddler'\ncounts = 3", ["counts is 3", "path of a .npy file"]),
        ("[[policy]]\nname = 'fiddler'\ncounts = 'none.npy'", ["'none.npy'", "cannot be read"]),
        ("[[policy]\nname", ["is not TOML"]),
    ],
)
def test_mistakes_in_toml_are_told_in_one_line(text, says, tmp_path):
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(OledError) as caught:
        policies_from_toml(tmp_path / "list.toml")
    told = str(caught.value)
    assert told.startswith(str(tmp_path / "list.toml")) and "\n" not in told
    for words in says:
        assert words in told


def test_toml_that_cannot_be_read(tmp_path):
    with pytest.raises(OledError, match=r"none\.toml cannot be read: No such file"):
        policies_from_toml(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OledError, match=r"bytes\.toml is not TOML"):
        policies_from_toml(tmp_path / "bytes.toml")


def test_wrong_types_in_python_are_told_alike():
    with pytest.raises(OledError, match=r"seed is '3'; it must be an integer"):
        Lru(seed="3")
    with pytest.raises(OledError, match=r"mode is 'keep'.*tie is None"):
        Lru(mode="keep", tie=None)


def test_the_laboratory_needs_numpy_alone():
    code = "import sys, oled_jax.retention; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def told_of_counts(folder: Path, name: str = "static-frequency") -> str:
    """What is said of ``counts.npy`` in ``folder``: the same by name and from TOML, each in one line."""
    with pytest.raises(OledError) as caught:
        policy_by_name(f"{name}:counts={folder / 'counts.npy'}")
    (folder / "list.toml").write_text(f"[[policy]]\nname = '{name}'\ncounts = 'counts.npy'")
    with pytest.raises(OledError) as again:
        policies_from_toml(folder / "list.toml")
    by_name, listed = (str(error.value).replace(str(folder / "counts.npy"), "counts.npy") for error in (caught, again))
    assert "\n" not in by_name + listed and len(by_name) < 1000
    sentence = by_name.partition("1 problem: ")[2]
    assert sentence and sentence in listed
    return sentence


def with_header(text: str) -> bytes:
    """A ``.npy`` file of six float64 under any header, well-formed or not."""
    padded = text + " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + bytes(48)


def test_tables_are_read_from_regular_files_alone(tmp_path):
    os.mkfifo(tmp_path / "counts.npy")
    assert "it is a named pipe, not a regular file" in told_of_counts(tmp_path)
    (tmp_path / "counts.npy").unlink()
    (tmp_path / "counts.npy").mkdir()
    assert "it is a folder, not a regular file" in told_of_counts(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(OledError, match=r"pipe\.toml cannot be read: it is a named pipe"):
        policies_from_toml(tmp_path / "pipe.toml")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (
            "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 100000000000)}",
            "its header claims the shape [1000000, 100000000000] of float64, but 48 bytes of data follow",
        ),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (7, 1)}", "but 48 bytes of data follow"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -3)}", "claims the shape [-2, -3]"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 3)}", "claims the shape [-1, 3]"),
        (f"{{'descr': '<f8', 'fortran_order': False, 'shape': (0, {10**30})}}", "cannot be read as a .npy file"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (True, 6)}", "cannot be read as a .npy file"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3)}", "does not hold one array of numbers but object"),
        ("{'descr': '<f99', 'fortran_order': False, 'shape': (2, 3)}", "cannot be read as a .npy file"),
        ("{1: 2, 'shape': (2, 3)}", "cannot be read as a .npy file"),
        ("{[]: 3}", "cannot be read as a .npy file"),
        ("-" * 9000 + "1", "cannot be read as a .npy file"),
        ("(" * 9000, "cannot be read as a .npy file"),
        ("", "cannot be read as a .npy file"),
    ],
)
def test_damaged_headers_are_told_in_one_line(tmp_path, header, says):
    (tmp_path / "counts.npy").write_bytes(with_header(header))
    assert says in told_of_counts(tmp_path)


def test_files_that_are_cut_short_or_of_another_kind(tmp_path):
    np.save(tmp_path / "whole.npy", np.arange(6.0).reshape(2, 3))
    whole = (tmp_path / "whole.npy").read_bytes()
    for length in (*range(0, 16), 100, len(whole) - 48, len(whole) - 1):
        (tmp_path / "counts.npy").write_bytes(whole[:length])
        assert "cannot be read as a .npy file" in told_of_counts(tmp_path)
    (tmp_path / "counts.npy").write_bytes(whole[:6] + b"\x03" + whole[7:])
    assert "its format version is 3.0, expected 1.0 or 2.0" in told_of_counts(tmp_path)
    np.savez(tmp_path / "many.npz", counts=np.ones((2, 3)))
    (tmp_path / "many.npz").rename(tmp_path / "counts.npy")
    assert "magic string is not correct" in told_of_counts(tmp_path)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<f8", ">f4", "f2", "u1", ">i8"])
def test_every_layout_of_numbers_is_read(tmp_path, order, version, dtype):
    array = np.array(np.arange(6).reshape(2, 3), dtype, order=order)
    with open(tmp_path / "counts.npy", "wb") as file:
        np.lib.format.write_array(file, array, version)
    policy = policy_by_name(f"static-frequency:counts={tmp_path / 'counts.npy'}")
    assert policy.counts.array.dtype == dtype and policy.counts.array.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", sorted(NEEDS_COUNTS))
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1])
def test_counts_that_count_nothing_are_refused(tmp_path, name, wrong):
    counts = np.ones((2, 3))
    counts[1, 2] = wrong
    np.save(tmp_path / "counts.npy", counts)
    says = f"counts holds {float(wrong)} at layer 1, expert 2 of counts.npy; it must hold finite numbers that are not"
    assert says in told_of_counts(tmp_path, name)
    with pytest.raises(OledError, match="at layer 0, expert 1; it"):
        StaticFrequency(counts=Table(np.array([[0, -3, 1]])))
