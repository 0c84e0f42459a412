"""``oled-jax plan``: the table, the object, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oled_jax.cli import main
from oled_jax.config import ModelConfig
from oled_jax.planner import make_plan

TINY = Path(__file__).parents[1] / "golden" / "llada2-tiny-f32"
SHARES = [None, 256, 192, 128, 102, 64, 32, 1]


def plan(*arguments) -> int:
    return main(["plan", "--model", *map(str, arguments)])


def refused(capsys, *arguments) -> str:
    """What a command says that must fail as a user's mistake does."""
    assert plan(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("oled-jax: error: ") and err.count("\n") == 1
    return err


def section(out: str, title: str) -> dict[str, float]:
    """The figures of one memory's table, by label."""
    lines = out.split(f"\n\n{title} ")[1].split("\n\n")[0].splitlines()[1:]
    return {line[:-9].strip(): float(line[-9:]) for line in lines}


def test_without_limits_settings_stand_side_by_side(capsys):
    assert plan("llada2.0-mini") == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, *rows = out.split("\n\n")[-1].splitlines()
    assert first.split() == ["experts", "on", "device", "N/E", "device", "GiB", "host", "GiB"]
    assert [row.split()[0] for row in rows] == ["all,", *map(str, SHARES[1:])]
    config = ModelConfig.from_preset("llada2.0-mini")
    for experts, row in zip(SHARES, rows, strict=True):
        expected = make_plan(config, dtype="bfloat16", context_length=4096, experts_on_device=experts)
        told = [float(figure) for figure in row.split()[-2:]]
        assert told == [round(table.total / 2**30, 2) for table in (expected.device, expected.host)]


def test_lines_add_up_and_stand_in_columns(capsys):
    assert plan("llada2.0-mini", "--experts-on-device", "40%") == 0
    out, _ = capsys.readouterr()
    assert out.startswith(
        "experts  102 of 256 (39.8%) on the device, in each MoE layer; 19 such layers, 6,291,456 bytes"
    )
    assert "context 4096, batch 1, blocks of 32; bfloat16" in out
    for title in ("device", "host memory"):
        lines = section(out, title)
        total = lines.pop("total")
        assert sum(lines.values()) == pytest.approx(total, abs=0.005 * (len(lines) + 1))
    assert section(out, "host memory")["expert bank, pinned"] == 28.5
    tables = [line for line in out.splitlines() if line.startswith("  ")]
    assert {len(line) for line in tables} == {37}


def test_a_device_alone_asks_for_auto(capsys):
    assert plan("llada2.0-mini", "--device-memory", "24GiB", "--host-memory", "64GiB") == 0
    out, _ = capsys.readouterr()
    device = section(out, "device")
    assert device["available"] == 24 and device["of it head-room"] == 1.7
    assert device["remaining"] == pytest.approx(24 - device["total"], abs=0.011)
    assert device["remaining"] >= device["of it head-room"]
    rows = out.split("\n\n")[-1].splitlines()
    assert rows[0].endswith("fits")
    assert [row.split()[-1] for row in rows[1:]] == ["no"] * 3 + ["yes"] * 5


def test_json_holds_integers_and_nothing_else_is_printed(capsys):
    flags = "--device-memory 24GiB --host-memory 64GB --context 2048 --batch 3 --staging 2 --block-length 64 --json"
    assert plan("llada2.0-mini", *flags.split()) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    expected = make_plan(
        ModelConfig.from_preset("llada2.0-mini"),
        dtype="bfloat16",
        context_length=2048,
        batch=3,
        staging=2,
        block_length=64,
        experts_on_device="auto",
        device_bytes=24 * 2**30,
        host_bytes=64 * 10**9,
    )
    others = told.pop("side_by_side")
    assert (told, err) == (json.loads(json.dumps(expected.to_json())), "")
    assert all(type(count) is int for table in ("device", "host") for count in told[table].values())
    assert told["batch"] == 4 and told["fits"]
    assert [other["experts_on_device"] for other in others] == SHARES
    assert [other["fits"] for other in others][:2] == [False, False]


def test_a_folder_or_its_config_is_enough(capsys, tmp_path):
    outputs = []
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    for model in (TINY, tmp_path, tmp_path / "config.json"):
        assert plan(model, "--context", 64) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert "float32" in outputs[0]
    assert plan(TINY, "--context", 64, "--dtype", "bfloat16", "--experts-on-device", "3") == 0
    out = capsys.readouterr().out
    assert "bfloat16" in out and "3 of 16 (18.8%)" in out and "N/E" not in out


def test_a_bank_beyond_the_default_pool_names_the_variable(capsys):
    assert plan("llada2.1-flash", "--experts-on-device", "25%") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=229 ")
    assert plan("llada2.1-mini", "--experts-on-device", "25%") == 0
    assert "XLA_PJRT" not in capsys.readouterr().out


def test_sampling_takes_more(capsys):
    totals = []
    for flags in ((), ("--sampled",)):
        assert plan("llada2.0-mini", "--batch", 8, "--context", 256, "--experts-on-device", 64, "--json", *flags) == 0
        totals.append(json.loads(capsys.readouterr().out)["device"]["total"])
    assert totals[0] < totals[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model",), "--model no-such-model does not exist"),
        (("no-such-model",), "llada2.0-mini"),
        (("",), "--model '' does not exist"),
        (("llada2.0-mini", "--device-memory", "much"), "--device-memory: 'much' is no number of bytes"),
        (("llada2.0-mini", "--experts-on-device", "0%"), "'0%'"),
        (("llada2.0-mini", "--experts-on-device", "140%"), "'140%'"),
        (("llada2.0-mini", "--experts-on-device", "257"), "from 1 to 256"),
        (("llada2.0-mini", "--experts-on-device", "auto"), "--device-memory"),
        (("llada2.0-mini", "--context", "40000"), "32768"),
        (("llada2.0-mini", "--batch", "0"), "--batch"),
        (("llada2.0-mini", "--staging", "0"), "--staging"),
        (("llada2.2-mini", "--block-length", "16"), "multiple of 32"),
        (("llada2.0-mini", "--dtype", "int8"), "int8"),
        (
            ("llada2.0-mini", "--device-memory", "12GiB", "--experts-on-device", "100"),
            "that fits is 80 experts",
        ),
        (("llada2.0-mini", "--device-memory", "4GiB"), "even 1 expert per layer with a context of 32 needs as much"),
        (("llada2.0-mini", "--device-memory", "24"), "'24' is 24 bytes: give a unit, as in 24GiB"),
        (("llada2.0-mini", "--device-memory", "5GiB", "--context", "32768"), "1 expert per layer with a context of 2"),
        (("llada2.0-flash", "--device-memory", "80GiB", "--host-memory", "128GiB"), "host memory needs"),
    ],
)
def test_what_is_refused(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_it_starts_no_backend_and_imports_no_jax():
    code = (
        "import sys; from oled_jax.cli import main\n"
        "main(['plan', '--model', 'llada2.0-mini'])\n"
        "print(sorted({'jax', 'flax', 'transformers', 'orbax'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("\n[]\n") and result.stderr == ""
