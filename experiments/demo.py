"""The trained model that ships, answering a few prompts with all its experts on the device and with fewer; offline.

    python experiments/demo.py [FOLDER] [--policy oled] [--layer N]          (``make demo`` runs it)

Promises: every prompt is answered twice in float32, greedily, fully resident and under a budget for experts, and both
answers are shown; if a token differs it says so and exits with 1. What the budget cost is what the engine's metrics
say. What stayed on the device, forward by forward in one layer, is drawn as text, and as FOLDER/retained_experts.png
where there is matplotlib; nothing else is written. The prompts are held-out problems of ``train/tasks.py``: the model
has not seen them in any phrasing.
"""

import argparse
import io
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oled_jax import Engine, Threshold
from oled_jax.arguments import integer
from oled_jax.cli.running import Parser, run_command
from oled_jax.decoding.loop import Generation
from oled_jax.errors import OledError
from oled_jax.files import write_whole
from oled_jax.progress import counted
from oled_jax.retention import StepRecord
from oled_jax.retention.record import KV_WRITE, PREFILL
from oled_jax.tokenizer import decode, encode_chat

PROMPTS = (
    "Add 827 and 738.",
    "Reverse the order of the words: train apple rock lamp wool leaf ear",
    "Use price = 921, city = Lisbon, friend = Mia, item = pond: We will meet {friend} in {city}. The price of the "
    "{item} is {price} euros.",
    "Make JSON of this: color gray, city Rome, friend Adam, count 96, item pig, name Tom, price 700, day Sunday",
    "Jane king, Julia bread, Lily pig, Anna boy, Henry toy, Jack rope, Max bear Look up Anna.",
    "Copy this: bread rope path fox train map 2315 toy song desk hat bone bell egg cake bird seed sun",
)  # few lengths, since a program is compiled for each
RULE = Threshold(block_length=32, threshold=0.9)
GEN_LENGTH = 128
CONTEXT = 512
GO_ON = """\
To go on:
  .venv/bin/oled-jax generate --model demo --prompt "Add 274 and 518." --experts-on-device 40%
  .venv/bin/oled-jax generate --model demo --prompt "Sort: 94 16 91 81" --experts-on-device 16 --policy oled
  .venv/bin/python experiments/demo.py --policy oled --experts-on-device 50% --layer 2"""

ABSENT, IDLE, HIT, KEPT, PASSING = range(5)  # what an expert is in a forward
MEANINGS = ("absent", "idle", "hit", "loaded and kept", "loaded for this forward")
COLOURS = ("#f7f7f7", "#c6dbef", "#2171b5", "#d94801", "#fdae6b")
CHARACTERS, PLAIN_CHARACTERS = "·░█▼▽", ".-#Vv"
MOST_LINES = 30  # of forwards in the text, so that all of it fits a small terminal


class Picture(NamedTuple):
    """One layer over F forwards. ``states`` ``[F, E]``: ABSENT to PASSING; ``phase``, ``block`` and ``prompt`` (from 1)
    ``[F]``."""

    states: np.ndarray
    phase: np.ndarray
    block: np.ndarray
    prompt: np.ndarray

    def count(self, *states: int) -> int:
        """Experts in one of ``states``, summed over the decoding forwards (the metrics keep prefill apart too)."""
        return int(np.isin(self.states[self.phase != PREFILL], states).sum())

    def new_prompt(self, forward: int) -> bool:
        """Whether a prompt begins with this forward."""
        return forward == 0 or self.prompt[forward] != self.prompt[forward - 1]

    def new_block(self, forward: int) -> bool:
        """Whether a block, or a prompt's decoding, begins with this forward."""
        where = [(self.prompt[i], self.block[i], self.phase[i] == PREFILL) for i in (max(0, forward - 1), forward)]
        return forward == 0 or where[0] != where[1]


def picture_of(records: Sequence[StepRecord], layer: int) -> Picture:
    """What became of every expert of the MoE layer of index ``layer``, in records of one sequence each.

    Resident is what was so before the forward: an idle expert may make room for one that is loaded and kept.
    """
    resident, admitted = (np.stack([getattr(r, name)[layer] for r in records]) for name in ("resident", "admitted"))
    wanted = np.stack([r.counts[layer] for r in records]) > 0
    states = np.select([wanted & resident, resident, wanted & admitted, wanted], [HIT, IDLE, KEPT, PASSING], ABSENT)
    phase, block, sequence = (np.array([getattr(r, n)[0] for r in records]) for n in ("phase", "block", "sequence"))
    return Picture(states, phase, block, sequence - sequence[0] + 1)


def text_of(picture: Picture, characters: str) -> list[str]:
    """The picture as lines: a forward each, an expert per column, and the legend."""
    forwards, experts = picture.states.shape
    legend = ", ".join(f"{characters[state]} {MEANINGS[state]}" for state in (HIT, IDLE, KEPT, PASSING, ABSENT))
    lines = [legend, f"{'expert':<10}" + "".join(f"{expert:<8}" for expert in range(0, experts, 8)).rstrip()]
    for forward in range(min(forwards, MOST_LINES)):
        number = picture.prompt[forward] if picture.new_block(forward) else ""
        name = f"block {picture.block[forward]}" if picture.new_block(forward) else ""
        name = {PREFILL: "prefill", KV_WRITE: "KV"}.get(int(picture.phase[forward]), name)
        row = "".join(characters[state] for state in picture.states[forward])
        lines.append(f"{number:<2}{name:<8}{row}")
    if forwards > MOST_LINES:
        lines.append(f"... and {counted(forwards - MOST_LINES, 'forward')} more")
    return lines


def characters_for(encoding: str | None) -> str:
    """The characters of the text, plain ones where ``encoding`` lacks the others."""
    try:
        CHARACTERS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_CHARACTERS
    return CHARACTERS


def canvas_class() -> Any:
    """Matplotlib's Figure; None where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "matplotlib":
            raise
        return None
    return Figure


def png_of(picture: Picture, title: str, canvas: Any) -> bytes:
    """The picture as a PNG: forwards to the right, experts upwards, lines where prompts and blocks begin."""
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    forwards, experts = picture.states.shape
    figure = canvas(figsize=(min(40, max(8, 2 + 0.3 * forwards)), 7.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    style = {"cmap": ListedColormap(COLOURS), "vmin": ABSENT, "vmax": PASSING, "interpolation": "nearest"}
    axes.imshow(picture.states.T, aspect="auto", origin="lower", **style)
    for forward in range(forwards):
        if picture.new_prompt(forward):
            axes.axvline(forward - 0.5, color="black", linewidth=1.5)
            axes.text(forward - 0.4, experts + 1.2, f"prompt {picture.prompt[forward]}", fontsize=8)
        elif picture.new_block(forward):
            axes.axvline(forward - 0.5, color="black", linewidth=0.9, linestyle=":")
    marks = []
    for phase, marker, name in ((KV_WRITE, "v", "writes a finished block's KV"), (PREFILL, "s", "prefill")):
        where = np.flatnonzero(picture.phase == phase)
        look = {"marker": marker, "markersize": 5, "linestyle": "", "color": "black", "label": name}
        axes.plot(where, np.full(len(where), experts + 0.3), clip_on=False, **look)
        marks.append(Line2D([], [], **look))
    marks.append(Line2D([], [], color="black", linewidth=0.9, linestyle=":", label="a block begins"))
    axes.set(xlim=(-0.5, forwards - 0.5), ylim=(-0.5, experts - 0.5), xlabel="forward", ylabel="expert")
    axes.set_title(title, fontsize=10, pad=22)
    patches = [Patch(facecolor=c, edgecolor="gray", label=m) for c, m in zip(COLOURS, MEANINGS, strict=True)]
    figure.legend(handles=patches + marks, loc="outside lower center", ncols=4, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def costs(answers: Sequence[Generation]) -> list[str]:
    """What answers took, as their metrics say (decoding; prefill is counted apart)."""
    experts = [answer.metrics.experts for answer in answers]
    hits, misses, loads = (sum(sum(getattr(e.decode, name)) for e in experts) for name in ("hits", "misses", "loads"))
    tokens, forwards, commits = (
        sum(getattr(answer.metrics, name) for answer in answers)
        for name in ("generated_tokens", "num_forwards", "num_commits")
    )
    return [
        f"{counted(tokens, 'token')} in {counted(forwards, 'forward')}, {tokens / max(1, forwards):.1f} tokens per "
        f"forward; {commits} more to write KV",
        f"{counted(hits, 'hit')}, {misses:,} misses (hit rate {hits / max(1, hits + misses):.0%}), "
        f"{counted(loads, 'expert')} loaded, {sum(e.bytes_moved for e in experts) / 1e6:.1f} MB moved",
    ]


def show_answers(prompt: str, pair: tuple[Generation, Generation], text: Callable[[list[int]], str]) -> bool:
    """Prints a prompt, the answers with all experts and with fewer, and whether their tokens are equal, as returned."""
    print(textwrap.fill(prompt, 78, initial_indent="> ", subsequent_indent="  "))
    for answer in pair:
        placed = answer.metrics.experts
        name = f"  {placed.experts_on_device} of {placed.num_experts}: "
        print(textwrap.fill(text(answer.tokens), 78, initial_indent=name, subsequent_indent=" " * len(name)))
    equal = pair[0].tokens == pair[1].tokens
    verdict = "equal" if equal else f"THE TOKENS DIFFER: {pair[0].tokens} and {pair[1].tokens}"
    print(f"  {verdict}; {costs(pair[1:])[0]}\n", flush=True)
    return equal


def layer_index(layers: Sequence[int], wanted: int | None) -> int:
    """Where ``wanted`` stands among the model's MoE ``layers``, by default the middle one; OledError if nowhere."""
    if wanted is not None and wanted not in layers:
        raise OledError(f"--layer {wanted} has no experts: give a layer from {min(layers)} to {max(layers)}")
    return len(layers) // 2 if wanted is None else list(layers).index(wanted)


def demonstrate(arguments: argparse.Namespace) -> int:
    """Everything that the command shows; returns the exit code, 1 if answers differ."""
    prompts = PROMPTS[: integer("--prompts", arguments.prompts, 1, len(PROMPTS))]
    load = {"dtype": "float32", "context_length": CONTEXT}
    # First the engine whose settings the user chose, and the folder: a mistake should not cost half a minute.
    budget = Engine.load("demo", experts_on_device=arguments.experts_on_device, policy=arguments.policy, **load)
    layers = budget.config.moe_layers
    index = layer_index(layers, arguments.layer)
    canvas, png = canvas_class(), arguments.folder / "retained_experts.png"
    if canvas:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    png.unlink(missing_ok=True)  # an older one would be of another run
    resident = Engine.load("demo", **load)
    share = arguments.experts_on_device
    print(f"The model that ships, with all experts on the device and with {share}; compiling first ...\n", flush=True)

    answers: list[Generation] = []
    records: list[StepRecord] = []
    differing = 0
    for prompt in prompts:
        ids = encode_chat(budget.tokenizer, prompt)
        reference = resident.generate(ids, RULE, gen_length=GEN_LENGTH)
        answers.append(budget.generate(ids, RULE, gen_length=GEN_LENGTH, on_record=records.append))
        differing += not show_answers(prompt, (reference, answers[-1]), lambda ids: decode(budget.tokenizer, ids))
    placed = answers[0].metrics.experts
    setting = f"{placed.experts_on_device} of {placed.num_experts} experts on the device, policy {placed.policy}"
    print(f"All prompts and {len(layers)} layers, {setting}:", *costs(answers), "", sep="\n")

    picture = picture_of(records, index)
    tally = f"{picture.count(HIT)} hits, {picture.count(KEPT, PASSING)} misses while decoding"
    print(f"Layer {layers[index]}: {tally}; a line is a forward, KV one that writes KV")
    print(*text_of(picture, characters_for(sys.stdout.encoding)), "", sep="\n")
    if canvas:
        write_whole(png, png_of(picture, f"Layer {layers[index]}, {setting}: {tally}", canvas))
        print(f"The same as a picture: {png}")
    else:
        print(f"{png} was not drawn, since matplotlib is missing: pip install -e '.[plots]', then again")
    print(GO_ON)
    if differing:
        print(f"demo: {differing} of {counted(len(prompts), 'prompt')} answered differently", file=sys.stderr)
    return 1 if differing else 0


def parser() -> Parser:
    """The command line; raises OledError where argparse would print its usage."""
    p = Parser(prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(command="demo", run=demonstrate)
    p.add_argument("folder", nargs="?", type=Path, default=Path("demo"), help="of the PNG (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="N", help="how many (default: %(default)s)")
    p.add_argument("--layer", type=int, metavar="N", help="the layer to draw (default: the middle one)")
    p.add_argument("--experts-on-device", default="40%", metavar="N|P%|auto", help="default: 40%%")
    p.add_argument("--policy", default="lru", help="what stays on the device (default: %(default)s)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 after one line about a user's mistake."""
    return run_command("demo", parser, argv)


if __name__ == "__main__":
    sys.exit(main())
