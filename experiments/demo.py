"""The whole way in a minute, offline: make a small random checkpoint, convert it, answer a prompt, also with a budget.

    python experiments/demo.py [FOLDER]          (``make demo`` runs it in ./demo)

Promises: every step is an ordinary command, printed before it runs, so that it can be repeated by hand; a checkpoint
that is already there is used again. Fails when the answers differ: neither converting nor a budget for experts may
change what a model says (in float32; bfloat16 rounds differently in products of another shape).
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
GENERATE = "--gen-length 64 --block-length 32 --dtype float32"
BUDGET = "--experts-on-device 40%"


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
        runs = [(published, ""), (converted, ""), (converted, BUDGET)]
        answers = [answer("oled-jax", "generate", "--model", path, *ask, *b.split(), "--json") for path, b in runs]
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    tokens, forwards = len(answers[0]["output_ids"]), answers[0]["num_forwards"]
    if any(a["output_ids"] != answers[0]["output_ids"] for a in answers):
        print(f"demo: the answers of {published}, {converted} and {converted} with {BUDGET} differ", file=sys.stderr)
        return 1
    print(f"\nThe text is noise, since the weights are random: {answers[0]['text']!r}")
    experts = answers[-1]["metrics"]["experts"]
    print(
        f"With {experts['experts_on_device']} of {experts['num_experts']} experts per layer on the device: hit rate "
        f"{experts['decode']['hit_rate']:.0%}, {sum(experts['decode']['loads'])} experts loaded, "
        f"{experts['bytes_moved'] / 1e6:.1f} MB"
    )
    print(f"demo: all three answers are equal: {tokens} tokens in {forwards} forwards")
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
