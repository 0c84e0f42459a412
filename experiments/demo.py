"""The whole way in a minute, offline: make a small random checkpoint, convert it, answer a prompt from both.

    python experiments/demo.py [FOLDER]          (``make demo`` runs it in ./demo)

Promises: every step is an ordinary command, printed before it runs, so that it can be repeated by hand; a checkpoint
that is already there is used again. Fails when the two answers differ, since converting must not change a model.
"""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

MAKE_CHECKPOINT = os.path.relpath(Path(__file__).with_name("make_checkpoint.py"))
COMMANDS = Path(sysconfig.get_path("scripts"))

# A miniature of LLaDA2.0-mini: one dense layer, three of 16 experts; 3 MB.
GEOMETRY = (
    "--preset llada2.0-mini --layers 4 --hidden 128 --heads 4 --kv-heads 2 --head-dim 32 --intermediate 256 "
    "--experts 16 --experts-per-token 4 --groups 4 --topk-groups 2 --moe-intermediate 64 --vocab 320 "
    "--max-position 2048 --max-shard-size 1MB"
)
PROMPT = "What does a diffusion language model do differently?"
GENERATE = "--gen-length 64 --block-length 32"


class DemoError(Exception):
    """A step that failed; the command itself has said why."""


def main(argv: list[str]) -> int:
    """Runs the demo in the folder ``argv`` names (default: demo); returns the exit code."""
    folder = Path(argv[0]) if argv else Path("demo")
    published, converted = folder / "huggingface", folder / "orbax"
    try:
        if not published.exists():
            run("python", MAKE_CHECKPOINT, *shlex.split(GEOMETRY), published)
        if not converted.exists():
            run("oled-convert", "to-orbax", published, converted)
        ask = ("--prompt", PROMPT, *shlex.split(GENERATE))
        if sys.stdout.isatty():  # to see the masks turn into text
            run("oled-jax", "generate", "--model", published, *ask)
        answers = [answer("oled-jax", "generate", "--model", path, *ask, "--json") for path in (published, converted)]
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    tokens, forwards = len(answers[0]["output_ids"]), answers[0]["num_forwards"]
    if any(a["output_ids"] != answers[0]["output_ids"] for a in answers):
        print(f"demo: the answers of {published} and {converted} differ", file=sys.stderr)
        return 1
    print(f"\nThe text is noise, since the weights are random: {answers[0]['text']!r}")
    print(f"demo: {published} and {converted} give equal answers: {tokens} tokens in {forwards} forwards")
    return 0


def run(program: str, *arguments: str | Path, capture: bool = False) -> str:
    """Runs one command and returns its standard output, if captured; DemoError when it fails or is not installed."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ {shlex.join([program, *words])}", flush=True)
    path = sys.executable if program == "python" else COMMANDS / program
    try:
        done = subprocess.run([path, *words], stdout=subprocess.PIPE if capture else None, text=True, check=True)
    except FileNotFoundError:
        raise DemoError(
            f"{program} is not installed for {sys.executable}: run make demo, or pip install -e ."
        ) from None
    except subprocess.CalledProcessError as error:
        raise DemoError(f"{program} {words[0]} failed with exit code {error.returncode}") from None
    return done.stdout or ""


def answer(*command: str | Path) -> dict:
    """Runs a command that prints one JSON object."""
    return json.loads(run(*command, capture=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
