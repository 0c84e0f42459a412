"""Ctrl-C in a process, and SIGTERM: one line, exit code 130 or 143, nothing else, whatever the command was doing.

The command is a fake whose body is Python source, run by the real ``main`` in a process of its own; signals are sent by
the body itself, so that no test depends on time. The last test interrupts XLA.
"""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from oled_jax.convert import cli as convert_cli

GOLDEN = Path(__file__).parents[1] / "golden"

# Native code that an interrupt does not bring back, with the interpreter free for other threads: a minute of hashing.
STUCK = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)"


def run_command(body, *, setup="", cwd=None):
    """Runs ``oled-jax generate`` with ``body`` in place of the subcommand; patience is short."""
    code = f"""
import hashlib, os, signal, sys, threading, time, weakref
from oled_jax.cli import generate, main, running
running._SECONDS_TO_NOTICE, running._SECONDS_TO_CLEAN_UP = 0.2, 0.4
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
{textwrap.dedent(setup)}
def run(args):
{textwrap.indent(textwrap.dedent(body), "    ")}
    return 0
generate.run = run
sys.argv = ["oled-jax", "generate", "--model", "m", "--prompt", "p"]
sys.exit(main())
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd)


def test_the_command_cleans_up_and_its_output_is_kept(tmp_path):
    result = run_command(
        """
        try:
            print("half an answer")
            interrupt()
        finally:
            open("cleaned", "w").close()
        """,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stdout) == (130, "half an answer\n")
    assert result.stderr == "oled-jax: interrupted\n"
    assert (tmp_path / "cleaned").exists()


# What an interrupt can run into, each the body of a command.
CASES = {
    "once": "interrupt()",
    "twice": "interrupt()\ninterrupt()",
    "again while cleaning up": "try: interrupt()\nfinally:\n    interrupt()\n    time.sleep(60)",
    "cleaning up takes too long": "try: interrupt()\nfinally: time.sleep(60)",
    "swallowed by the command": "try: interrupt()\nexcept BaseException: pass",
    "turned into another error": "try: interrupt()\nexcept BaseException: raise RuntimeError('defect') from None",
    "in native code": f"threading.Timer(0.1, interrupt).start()\n{STUCK}",
    "again in native code": f"for s in (0.1, 0.15): threading.Timer(s, interrupt).start()\n{STUCK}",
    "lost in a callback": """
class Garbage: pass
garbage = Garbage()
callback = weakref.ref(garbage, lambda reference: interrupt())
del garbage
for _ in range(600): time.sleep(0.1)
""",
}


@pytest.mark.parametrize("body", CASES.values(), ids=CASES.keys())
def test_one_line_whatever_it_meets(body):
    result = run_command(body)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "oled-jax: interrupted\n")


@pytest.mark.parametrize("case", ["once", "swallowed by the command", "in native code", "lost in a callback"])
def test_sigterm_is_an_interrupt_of_its_own_code(case):
    result = run_command(CASES[case].replace("interrupt", "terminate"))
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "oled-jax: terminated\n")


@pytest.mark.parametrize("again", ["terminate", "interrupt"])
def test_while_cleaning_up_an_interrupt_hurries_it_and_another_sigterm_does_not(again, tmp_path):
    result = run_command(
        f"""
        args.seconds_to_clean_up = 60
        try:
            terminate()
        finally:
            {again}()
            time.sleep(1.5)
            open("cleaned", "w").close()
        """,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "oled-jax: terminated\n")
    assert (tmp_path / "cleaned").exists() == (again == "terminate")


def test_sigterm_reaches_a_command_in_the_background():
    body = "interrupt()\ntry: terminate()\nfinally: print('cleaned up')"
    result = run_command(body, setup="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (result.returncode, result.stdout, result.stderr) == (143, "cleaned up\n", "oled-jax: terminated\n")


def test_an_import_is_not_unwound(tmp_path):
    """Native modules that are being initialised would abort; this one in Python shows that nothing is raised in it."""
    (tmp_path / "interrupted.py").write_text("import __main__\ntry: __main__.interrupt()\nfinally: print('raised')\n")
    result = run_command("import interrupted", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "oled-jax: interrupted\n")


def test_after_the_command_an_interrupt_is_silent():
    result = run_command("import atexit; atexit.register(interrupt); print('an answer')")
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "an answer\n", "")


def test_a_command_in_the_background_ignores_interrupts():
    result = run_command("interrupt(); print('an answer')", setup="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "an answer\n", "")


def test_an_interrupted_conversion_names_what_it_left(tmp_path):
    code = f"""
import os, signal, sys
from oled_jax.convert import to_hf
def convert(source, destination, *settings, progress):
    os.mkdir(f"{{destination}}.partial")
    os.kill(os.getpid(), signal.SIGINT)
to_hf.to_hf = convert
sys.argv = ["oled-convert", "to-hf", {str(GOLDEN / "llada2-tiny-f32")!r}, "new"]
from {convert_cli.__name__} import main
sys.exit(main())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == (
        "oled-convert: interrupted; finished work is kept in new.partial, and the same command resumes it\n"
    )


@pytest.mark.parametrize("seconds", [0.02, 0.1])
def test_while_xla_compiles_the_step(seconds, monkeypatch):
    """XLA's threads go on after the interrupted call; the interpreter must not be taken down around them."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    arguments = ["--model", str(GOLDEN / "llada2-tiny-f32"), "--prompt-ids", "1", "--mask-id", "319", "--json"]
    code = f"""
import os, signal, sys, threading
import jax
from oled_jax.cli import main
from oled_jax.display import CompileLine
compile_ = jax.stages.Lowered.compile
def compile_and_interrupt(*arguments):
    threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT)).start()
    return compile_(*arguments)
def announced(self, name):
    if name == "denoise":
        jax.stages.Lowered.compile = compile_and_interrupt
CompileLine.__call__ = announced
sys.argv = ["oled-jax", "generate", *{arguments!r}]
sys.exit(main())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "oled-jax: interrupted\n")
