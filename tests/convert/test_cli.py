"""The command: exit codes, messages, and what inspect and compare say."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from oled_jax.checkpoint import layout
from oled_jax.convert.cli import main
from oled_jax.version import __version__

from .conftest import GOLDEN


def mistake(result):
    """Asserts a user's mistake: exit code 2, nothing on standard output, one line on standard error."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("oled-convert: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("verb", ["to-orbax", "to-hf"])
def test_a_destination_that_exists_is_refused(verb, published, tmp_path, command):
    for kind in ("empty", "full", "file", "link"):
        destination = tmp_path / kind
        if kind in ("empty", "full"):
            destination.mkdir()
        if kind == "full":
            (destination / "precious").touch()
        if kind == "file":
            destination.touch()
        if kind == "link":
            destination.symlink_to(tmp_path / "nowhere")
        assert "exists: nothing is overwritten" in mistake(command(verb, published, destination))
        assert os.path.lexists(destination)
        assert not (tmp_path / f"{kind}.partial").exists()
    assert "both source and destination" in mistake(command(verb, published, published))
    assert "both source and destination" in mistake(command(verb, published, published / ".." / "published"))
    assert "name it otherwise" in mistake(command(verb, published, tmp_path / "x.partial"))


def test_a_bad_source_leaves_nothing(published, tmp_path, command):
    (published / "model-00002-of-00003.safetensors").unlink()
    before = sorted(tmp_path.iterdir())
    for verb in ("to-orbax", "to-hf"):
        err = mistake(command(verb, published, tmp_path / "destination"))
        assert "shard model-00002-of-00003.safetensors is missing" in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to-orbax"], "required: SRC, DST"),
        (["frobnicate"], "invalid choice"),
        (["inspect", "/nonexistent"], "/nonexistent does not exist"),
        (["compare", "/nonexistent", "/nonexistent"], "/nonexistent does not exist"),
        (["to-hf", "a", "b", "--max-shard-size", "0"], "argument --max-shard-size: '0' is no number of bytes"),
        (["to-hf", "a", "b", "--max-shard-size", "5 apples"], "'5 apples' is no number of bytes"),
    ],
)
def test_mistakes_are_one_line(arguments, message, command):
    assert message in mistake(command(*arguments))


def test_without_a_command_the_commands_are_listed(command, capsys):
    code, out, told = command()
    assert (code, out) == (2, "")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert (end.value.code, capsys.readouterr()) == (0, (told, ""))
    listed = told[told.index("commands:") :].splitlines()[2:]
    assert [line.split()[0] for line in listed] == ["to-orbax", "to-hf", "inspect", "compare"]


def test_a_converted_folder_is_not_converted_again(published, tmp_path, command):
    assert command("to-orbax", published, tmp_path / "a")[0] == 0
    assert "is converted already" in mistake(command("to-orbax", tmp_path / "a", tmp_path / "b"))
    assert not (tmp_path / "b.partial").exists()


def test_a_destination_that_cannot_be_made_is_one_line(published, tmp_path, command):
    (tmp_path / "file").touch()
    mistake(command("to-orbax", published, tmp_path / "file" / "destination"))


def test_missing_parents_of_the_destination_are_made(published, tmp_path, command):
    code, out, _ = command("to-hf", published, tmp_path / "new" / "folder" / "back")
    assert code == 0
    assert out.startswith(f"{tmp_path / 'new' / 'folder' / 'back'}: 852 kB")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"oled-convert {__version__}\n"


def test_inspect(published, tmp_path, command):
    code, out, _ = command("inspect", published, "--json")
    facts = json.loads(out)
    assert code == 0
    assert {k: v for k, v in facts.items() if k not in ("config", "path")} == {
        "format": "huggingface",
        "layout": "experts one by one",
        "files": 3,
        "stored_tensors": 189,
        "weight_dtype": "bfloat16",
        "bias_dtype": "float32",
        "tensors": 189,
        "parameters": 425_712,
        "bytes": 851_520,
    }
    assert facts["config"]["num_experts"] == 16
    text = command("inspect", published)[1]
    for word in ("huggingface", "bfloat16", "425,712", "851,520", "16 of width 32"):
        assert word in text
    command("to-orbax", published, tmp_path / "converted")
    facts = json.loads(command("inspect", tmp_path / "converted", "--json")[1])
    assert (facts["format"], facts["layout"], facts["parameters"]) == ("orbax", "experts stacked", 425_712)
    assert "6 of 16 experts per window of 8 tokens" in command("inspect", GOLDEN / "llada22-tiny-f32")[1]


def test_compare_names_every_difference(published, tmp_path, command, monkeypatch):
    monkeypatch.setattr(layout, "UNIT_BYTES", 60_000)  # the head comes in several pieces, and differs in the first
    other = shutil.copytree(published, tmp_path / "other")
    changed = {
        "model.layers.1.mlp.experts.3.down_proj.weight": 2,
        "model.layers.3.mlp.experts.15.up_proj.weight": 1,
        "model.layers.2.mlp.gate.expert_bias": 1,
        "lm_head.weight": 3,
    }
    for file in other.glob("*.safetensors"):
        tensors = {name: t.copy() for name, t in safetensors.numpy.load_file(file).items()}
        for name in changed.keys() & tensors.keys():
            bits = tensors[name].reshape(-1).view(np.uint8)
            for i in range(changed[name]):
                bits[i * tensors[name].itemsize] ^= 1
        safetensors.numpy.save_file(tensors, file)
    config = json.loads((other / "config.json").read_text()) | {"rope_theta": 5.0}
    (other / "config.json").write_text(json.dumps(config))
    converted = tmp_path / "converted"
    assert command("to-orbax", other, converted)[0] == 0
    for b in (other, converted):
        code, out, _ = command("compare", published, b)
        assert code == 1
        assert sorted(out.splitlines()) == sorted(
            [
                "config rope_theta: 600000.0 against 5.0",
                "model.layers.1.mlp.experts.3.down_proj.weight: 2 of 2,048 elements differ",
                "model.layers.3.mlp.experts.15.up_proj.weight: 1 of 2,048 elements differ",
                "model.layers.2.mlp.gate.expert_bias: 1 of 16 elements differ",
                "lm_head.weight: 3 of 20,480 elements differ",
                "5 differences",
            ]
        )


@pytest.mark.parametrize(
    ("left", "right", "equal"), [(np.nan, np.nan, True), (0.0, -0.0, False), (1e-40, 0.0, False), (0.0, 0.0, True)]
)
def test_compare_looks_at_bits(left, right, equal, tmp_path, command):
    for name, value in (("left", left), ("right", right)):
        folder = shutil.copytree(GOLDEN / "llada2-tiny-f32", tmp_path / name)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = np.full(64, value, np.float32)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    code, out, _ = command("compare", tmp_path / "left", tmp_path / "right")
    assert code == (0 if equal else 1)
    assert ("model.norm.weight: 64 of 64 elements differ" in out) is not equal


def test_compare_tells_other_dtypes_and_sizes_apart(published, tmp_path, command):
    code, out, _ = command("compare", published, GOLDEN / "llada2-tiny-f32")
    assert code == 1
    assert "weights: bfloat16 against float32" in out
    code, out, _ = command("compare", GOLDEN / "llada2-tiny-f32", GOLDEN / "llada2-tiny-wide-f32")
    assert code == 1
    assert "config num_experts: 16 against 64" in out
    other = shutil.copytree(published, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(file)
        dtype = next(t.dtype for n, t in tensors.items() if not n.endswith("expert_bias"))
        tensors = {n: t.astype(dtype) for n, t in tensors.items()}
        safetensors.numpy.save_file(tensors, file)
    code, out, _ = command("compare", published, other)
    assert code == 1
    assert "expert biases: float32 against bfloat16" in out


def test_the_command_restricts_itself_to_the_cpu_and_warns_of_nothing(published, tmp_path):
    code = (
        "import sys, warnings; warnings.simplefilter('default')\n"
        "from oled_jax.convert.cli import main\n"
        "assert 'jax' not in sys.modules\n"
        "code = main(sys.argv[1:])\n"
        "import jax; assert {d.platform for d in jax.devices()} == {'cpu'}\n"
        "sys.exit(code)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    arguments = ["to-orbax", str(published), str(tmp_path / "converted")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_it_runs_as_a_module(published, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "oled_jax.convert", "inspect", str(published)],
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
