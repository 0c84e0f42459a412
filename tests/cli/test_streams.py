"""Standard streams that are full, closed, gone or cannot show a character, for both commands, as processes."""

import os
import subprocess
import sys

import pytest

MODULES = {"oled-jax": "oled_jax.cli", "oled-convert": "oled_jax.convert"}
CLOSED = "{prog}: error: standard output is closed: send it somewhere, such as >/dev/null\n"


def shell(command, *, redirections="", **kwargs):
    """Runs a command of this Python in a shell, for its redirections."""
    environment = {**os.environ, "PYTHON": sys.executable, **kwargs.pop("env", {})}
    return subprocess.run(
        ["bash", "-c", f'"$PYTHON" {command} {redirections}'],
        capture_output=True,
        check=False,
        env=environment,
        **kwargs,
    )


@pytest.fixture(params=MODULES.items(), ids=MODULES.keys())
def command(request):
    """Name and command line of one that prints a line."""
    prog, module = request.param
    return prog, f"-m {module} --version"


def printing(text):
    """A command line of ``oled-jax generate`` that prints ``text``, with the help of the environment."""
    code = (
        "import os, sys; from oled_jax.cli import generate, main\n"
        "generate.run = lambda args: print(os.environ['TEXT'], flush=True) or 0\n"
        "sys.argv = ['oled-jax', 'generate', '--model', 'm', '--prompt', 'p']; sys.exit(main())"
    )
    return '-c "$CODE"', {"CODE": code, "TEXT": text}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_output_that_cannot_be_written(command):
    prog, line = command
    result = shell(line, redirections=">/dev/full")
    told = f"{prog}: error: standard output cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr.decode()) == (2, told)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("size", [10, 100_000])
def test_an_answer_that_cannot_be_written(size):
    line, environment = printing("x" * size)
    result = shell(line, redirections=">/dev/full", env=environment)
    told = "oled-jax: error: standard output cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr.decode()) == (2, told)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_an_error_that_cannot_be_told():
    assert shell("-m oled_jax.cli nonsense", redirections="2>/dev/full").returncode == 2


def test_closed_output(command):
    prog, line = command
    result = shell(line, redirections=">&-")
    assert (result.returncode, result.stderr.decode()) == (2, CLOSED.format(prog=prog))


def test_everything_closed(command):
    assert shell(command[1], redirections="<&- >&- 2>&-").returncode == 2


def test_closed_error_output_leaves_the_answers_alone():
    """What would go to standard error goes nowhere, not to standard output or a file that got its descriptor."""
    code = (
        "import os, sys; from oled_jax.cli import generate, main\n"
        "def run(args):\n"
        "    file = open('written', 'w'); os.write(2, b'native'); print('summary', file=sys.stderr); print('answer')\n"
        "    return 0\n"
        "generate.run = run\n"
        "sys.argv = ['oled-jax', 'generate', '--model', 'm', '--prompt', 'p']; sys.exit(main())"
    )
    line = 'cd "$(mktemp -d)" && "$PYTHON" -c "$CODE" 2>&- && cat written && rm written && rmdir "$PWD"'
    environment = {**os.environ, "PYTHON": sys.executable, "CODE": code}
    result = subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=environment)
    assert (result.returncode, result.stdout) == (0, b"answer\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_is_quiet(command, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        line = [sys.executable, *command[1].split()]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        result = subprocess.run(line, stdout=closed, stderr=subprocess.PIPE, check=False, env=environment)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PYTHONIOENCODING": "ascii"}, b"na?ve ??\n"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"na?ve ??\n"),
        ({"PYTHONIOENCODING": "latin-1"}, "na\u00efve ??\n".encode("latin-1")),
        ({"PYTHONUTF8": "1"}, "na\u00efve \u65e5\u672c\n".encode()),
    ],
)
def test_what_cannot_be_shown_is_replaced(environment, shown):
    code = (
        "import os, sys; from oled_jax.cli import generate, main\n"
        "generate.run = lambda args: print('na\\u00efve \\u65e5\\u672c') or 0\n"
        "sys.argv = ['oled-jax', 'generate', '--model', 'm', '--prompt', 'p']; sys.exit(main())"
    )
    result = shell('-c "$CODE"', env={"CODE": code, **environment})
    assert (result.returncode, result.stdout, result.stderr) == (0, shown, b"")
