"""Machine files: those that ship, what they say about measured steps, costs for a geometry, and what is refused."""

import dataclasses
import subprocess
import sys
from importlib import resources

import pytest

from oled_jax import OledError
from oled_jax.config import ModelConfig
from oled_jax.dispatch import TICK
from oled_jax.lab.machine import Geometry, Machine, machine_names, read_machine

MINI = Geometry.of(ModelConfig.from_preset("llada2.0-mini"))
H200 = (resources.files("oled_jax.configs") / "machines" / "h200.toml").read_text()


def test_machines_ship_with_the_package():
    assert machine_names() == ("a5000", "h200", "rtx5090")
    sources = {name: read_machine(name).source for name in machine_names()}
    assert sources == {"a5000": "public figures", "h200": "measured", "rtx5090": "public figures"}
    assert all(read_machine(name).name == name for name in machine_names())


def test_bytes_of_the_published_models():
    assert MINI.expert_bytes == 6 * 2**20  # 3 * 2048 * 512 in bfloat16
    # Everything but normalisation weights and embeddings: 16,255,643,392 parameters in all.
    counted = 19 * (256 * MINI.expert_bytes + MINI.layer_bytes) + MINI.other_bytes
    embeddings = 2 * 157184 * 2048
    assert 2 * 16_255_643_392 - embeddings == pytest.approx(counted, rel=1e-4)
    assert Geometry.of(ModelConfig.from_preset("llada2.0-flash")).expert_bytes == 24 * 2**20


@pytest.mark.parametrize(("misses", "measured"), [(0, 4.05), (1, 6.89), (3, 12.6), (8, 27.1), (16, 50.1)])
def test_the_h200_file_tells_the_measured_step_by_misses(misses, measured):
    """Experts of 19 layers at 100 slots: the probe that the file was made from, within 4 %."""
    costs = read_machine("h200").layer_costs(MINI, 96, staging=4)
    milliseconds = 19 * (costs.hits_start + misses * costs.load) * TICK * 1e3
    assert milliseconds == pytest.approx(measured, rel=0.04)


def test_the_h200_file_tells_the_whole_step_at_full_residency():
    machine = read_machine("h200")
    costs = machine.layer_costs(MINI, 252, staging=4)
    seconds = 19 * (costs.hits_start - 20e-6 / TICK + costs.attention) * TICK + machine.step_seconds(MINI)
    assert seconds == pytest.approx(11.4e-3, rel=0.01)


def test_the_h200_file_tells_the_measured_host_kernel():
    costs = read_machine("h200").layer_costs(MINI, 100)
    for tokens, measured in ((1, 0.095), (2, 0.11), (4, 0.16), (8, 0.27)):
        assert costs.host_time(tokens, shared=False) * TICK * 1e3 == pytest.approx(measured, rel=0.07)


def test_one_file_serves_any_geometry():
    machine = read_machine("a5000")
    small, large = (machine.layer_costs(Geometry(expert_bytes=n * 6_500_000), 64) for n in (1, 4))
    overhead = round(machine.link.expert_overhead / TICK)
    assert small.load == overhead + 25_000 and large.load == overhead + 100_000  # 0.25 ms and 1 ms at 26 GB/s
    assert large.host_token == pytest.approx(4 * small.host_token, rel=1e-3)
    assert machine.load_seconds(Geometry(6_500_000)) == pytest.approx(small.load * TICK)


def test_slots_count_where_all_of_them_are_read():
    h200, a5000 = read_machine("h200"), read_machine("a5000")
    few, many = (h200.layer_costs(MINI, capacity) for capacity in (40, 140))
    assert (many.hits_start - few.hits_start) * TICK == pytest.approx(100 * 1.642e-6, rel=0.01)
    assert few.hit == few.device_expert == 0
    assert few.round == few.hits_start and (few.slots, few.staging) == (40, 4)
    assert a5000.layer_costs(MINI, 40) == a5000.layer_costs(MINI, 140)


def test_a_slower_link():
    machine = read_machine("h200")
    slow = machine.slower_link(4)
    assert slow.load_seconds(MINI) == pytest.approx(4 * machine.load_seconds(MINI))
    ours, theirs = machine.layer_costs(MINI, 40), slow.layer_costs(MINI, 40)
    changed = {name for name, value in vars(ours).items() if value != getattr(theirs, name)}
    assert changed == {"load", "load_shared"}
    with pytest.raises(OledError, match=r"1 to 1000 times slower, not 0.5 times"):
        machine.slower_link(0.5)


def test_a_machine_without_a_host(tmp_path):
    start, end = H200.index("[host]"), H200.index("[step]")
    path = tmp_path / "mine.toml"
    path.write_text(H200[:start] + H200[end:])
    machine = read_machine(path)
    assert machine.host is None and not machine.layer_costs(MINI, 64).has_host
    assert dataclasses.replace(machine, host=read_machine("h200").host) == read_machine("h200")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("bandwidth = 48.8e9\n", "", ["1 problem", "link.bandwidth is missing"]),
        ("bandwidth = 48.8e9\n", "bandwidth = -1\n", ["link.bandwidth is -1; it must be a number of bytes a second"]),
        ("bandwidth = 48.8e9\n", "bandwidth = nan\n", ["link.bandwidth is nan"]),
        ("overhead = 152e-6", "overhead = -152e-6", ["step.overhead is -0.000152; it must be a number of seconds"]),
        ("overhead = 152e-6", "overhead = 'much'", ["step.overhead is 'much'"]),
        (
            "overhead = 152e-6",
            "overheads = 1",
            ["2 problems", "unknown key 'overheads'; its keys are overhead, layer_ov"],
        ),
        ('reads = "slots"', 'reads = "some"', ["device.reads is 'some'; it must be 'wanted' or 'slots'"]),
        ("overlaps = false", "overlaps = 0", ["device.overlaps is 0; it must be true or false"]),
        ('source = "measured"', 'source = "guess"', ["source is 'guess'; it can be measured, public figures, calib"]),
        ("[step]", "[steps]", ["2 problems", "unknown key 'steps'", "[step] is missing"]),
        ('name = "h200"', "name = 7", ["name is 7, expected a word"]),
        ("[link]", "[link", ["cannot be read as TOML"]),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, old, new, parts):
    assert old in H200
    path = tmp_path / "mine.toml"
    path.write_text(H200.replace(old, new, 1))
    with pytest.raises(OledError) as caught:
        read_machine(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for part in parts:
        assert part in message


def test_other_names_and_files_are_refused(tmp_path):
    with pytest.raises(
        OledError, match=r"unknown machine 'h100': the machines are a5000, h200, rtx5090, or a \.toml file"
    ):
        read_machine("h100")
    with pytest.raises(OledError, match=r"gone\.toml cannot be read: No such file"):
        read_machine(tmp_path / "gone.toml")
    with pytest.raises(OledError, match=r"cannot be read: it is a folder"):
        (tmp_path / "folder.toml").mkdir()
        read_machine(tmp_path / "folder.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OledError, match=r"bytes\.toml' cannot be read"):
        read_machine(tmp_path / "bytes.toml")


def test_costs_beyond_what_can_be_reckoned_with_are_refused():
    with pytest.raises(OledError, match=r"machine a5000 with experts of 26,000,000,000 bytes: .*load is"):
        read_machine("a5000").layer_costs(Geometry(26_000_000_000), 64)


def test_machines_need_no_jax():
    code = """
import sys
sys.modules["jax"] = None
from oled_jax.config import ModelConfig
from oled_jax.lab.machine import Geometry, machine_names, read_machine
import oled_jax.lab.timing
for name in machine_names():
    read_machine(name).layer_costs(Geometry.of(ModelConfig.from_preset("llada2.1-flash")), 32)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_of_the_file_are_the_fields():
    assert Machine.from_toml(H200, "h200") == read_machine("h200")
