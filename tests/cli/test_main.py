"""The command as a process sees it: version, exit codes, ends that are not a result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import oled_jax
from oled_jax.cli import COMMANDS, main
from oled_jax.errors import OledError

ROOT = Path(__file__).parents[2]


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert (end.value.code, capsys.readouterr()) == (0, (told, ""))
    listed = told[told.index("commands:") :].splitlines()[2:]
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(len(line.split()) > 1 for line in listed)


def test_interrupt(generate, engine, model, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "generate", interrupted)
    assert generate(model, "--prompt-ids", "1") == 130
    assert capsys.readouterr() == ("", "oled-jax: interrupted\n")


def test_engine_error_is_told_in_one_line(mistake, engine, model, monkeypatch):
    def refuse(*args, **kwargs):
        raise OledError("first\nsecond")

    monkeypatch.setattr(engine, "generate", refuse)
    assert mistake("--prompt-ids", "1", model=model) == "oled-jax: error: first second\n"


def test_defects_keep_their_traceback(generate, engine, model, monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("a defect")

    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(TypeError, match="a defect"):
        generate(model, "--prompt-ids", "1")


def run_python(*arguments, **kwargs):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, text=True, check=False, **kwargs)


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_closed_pipe_is_quiet(options):
    code = (
        "import sys; from oled_jax.cli import generate, main\n"
        "generate.run = lambda args: print('an answer') or 0\n"
        "sys.exit(main(['generate', '--model', 'm', '--prompt', 'p']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        result = run_python(*options, "-c", code, stdout=closed, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (141, "")


def test_version_and_help_load_nothing_heavy():
    code = (
        "import sys; from oled_jax.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, sorted({'jax', 'flax', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    for arguments, first in ((["--version"], f"oled-jax {oled_jax.__version__}"), (["generate", "--help"], "usage: ")):
        result = run_python("-c", code, *arguments, capture_output=True)
        assert result.stdout.startswith(first) and result.stdout.endswith("0 []\n")


def test_entry_point_reports_a_mistake():
    result = run_python("-m", "oled_jax.cli", "generate", "--model", "any", "--prompt-ids", "", capture_output=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("oled-jax: error: --prompt-ids is empty") and result.stderr.count("\n") == 1
