"""What the installed package consists of: every room is listed for the build, and the commands start."""

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import oled_jax

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders_with_python(top: str, package: str) -> set[str]:
    """Package names of ``top`` and of the folders below it that hold Python files."""
    base = ROOT / top
    folders = {path.parent.relative_to(base) for path in base.rglob("*.py")}
    return {".".join((package, *folder.parts)) for folder in folders}


def test_the_build_lists_every_package():
    found = (
        folders_with_python("oled_jax", "oled_jax")
        | folders_with_python("convert", "oled_jax.convert")
        | folders_with_python("configs", "oled_jax.configs")
    )
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_version_has_one_source():
    assert importlib.metadata.version("oled-jax") == oled_jax.__version__


def test_no_dependency_is_capped_and_none_is_torch():
    project = PYPROJECT["project"]
    groups = {"main": project["dependencies"], **project["optional-dependencies"]}
    for group, requirements in groups.items():
        for requirement in requirements:
            assert not {"<", "=="} & {requirement[i : i + n] for n in (1, 2) for i in range(len(requirement))}, (
                requirement
            )
            assert not requirement.startswith("torch"), group


@pytest.mark.parametrize("command", PYPROJECT["project"]["scripts"])
def test_a_command_tells_its_version(command):
    module, _, function = PYPROJECT["project"]["scripts"][command].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    code = f"import sys; from {module} import {function}; sys.argv = [{command!r}, '--version']; sys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == oled_jax.__version__
