"""What the figure scripts share: a command line, what traces say of themselves, and a CSV and a picture of each figure.

    python experiments/figures/fig07_overlap.py TRACE... [--out DIR] [--split evaluation]

Every script turns traces into numbers (rows of a CSV), draws those same rows, and says in one sentence per trace what
they are, with the model, block length, threshold, batch, W and how many prompts and forwards it rests on. Counts and
shares are exact for the trace; whatever a machine was assumed for is named ``simulated``. Files appear under their
names when they are whole. Without matplotlib there is the CSV alone.

Deliberately not here: what a figure measures, and any verdict on what it shows.
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oled_jax.cli.running import EXIT_INTERRUPTED, EXIT_MISTAKE, Parser
from oled_jax.config import ModelConfig
from oled_jax.errors import OledError
from oled_jax.files import write_whole
from oled_jax.lab import Stream, Trace, read_trace
from oled_jax.lab.statistics import bootstrap
from oled_jax.lab.sweep import layer_demand
from oled_jax.lab.trace import PADDING
from oled_jax.progress import counted
from oled_jax.retention.record import PREFILL

Row = dict[str, Any]

_SUFFIXES = (".gz", ".safetensors")
_PANEL = (4.4, 3.3)  # inches


class Recorded(NamedTuple):
    """A trace that was read. ``facts``: the columns that begin each of its rows."""

    trace: Trace
    stream: Stream
    facts: Row

    @property
    def config(self) -> ModelConfig:
        """The model's; OledError if the trace does not tell."""
        described = self.trace.metadata.get("config")
        if not isinstance(described, dict):
            raise OledError(f"{self.trace.source} does not tell of its model's sizes: record it with `oled-jax trace`")
        return ModelConfig.from_hf(described)

    @property
    def caption(self) -> str:
        """What every number of this trace has to be read with."""
        return caption(self.facts)


class Figure(NamedTuple):
    """A script. ``name``: of its files; ``measure(recorded, args)``: the rows of one trace, without its facts;
    ``say(rows)``: a sentence about those; ``panels``: how many there are side by side; ``draw(axes, rows)``: fills
    them, for one trace, or with ``together`` for all of them; ``options(parser)``: adds the script's own;
    ``show(rows)``: text to print below the sentence; ``check(every)``: OledError for traces that do not go together."""

    name: str
    about: str
    measure: Callable[[Recorded, argparse.Namespace], list[Row]]
    say: Callable[[list[Row]], str]
    panels: int
    draw: Callable[[Sequence[Any], list[Row]], None]
    together: bool = False
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    show: Callable[[list[Row]], str] | None = None
    check: Callable[[list[Recorded]], None] = lambda every: None


def run(figure: Figure, argv: Sequence[str] | None = None) -> int:
    """Runs a script's command line; returns the exit code, 2 after one line about a user's mistake."""
    try:
        args = parser_of(figure).parse_args(argv)
        recorded = read(args.traces, args.split)
        figure.check(recorded)
        out = _folder(args.out)
        groups = [[one.facts | row for row in figure.measure(one, args)] for one in recorded]
        rows = [row for group in groups for row in group]
        written = [out / f"{figure.name}.csv"]
        write_whole(written[0], to_csv(rows))
        picture = out / f"{figure.name}.png"
        picture.unlink(missing_ok=True)  # an older one would be of other numbers
        image = _picture(figure, groups)
        if image is not None:
            write_whole(picture, image)
            written.append(picture)
        for one, group in zip(recorded, groups, strict=True):
            print(f"{figure.name}, {one.facts['trace']}: {figure.say(group)} ({one.caption})")
            if figure.show:
                print(figure.show(group))
        print(f"written: {', '.join(map(str, written))}")
        if image is None:
            print(
                f"no picture: matplotlib is missing; pip install matplotlib (or oled-jax[plots]), then run this again "
                f"for {picture}",
                file=sys.stderr,
            )
    except (OledError, OSError) as error:
        print(f"{figure.name}: error: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print(f"\n{figure.name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def read(paths: Sequence[str], split: str | None = None) -> list[Recorded]:
    """The traces, or the prompts of a split in each; OledError for what is no trace, or two of one name."""
    names = [_name(path) for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OledError(f"two traces are called {twice[0]!r}: give files of different names, once each")
    found = []
    for path, name in zip(paths, names, strict=True):
        trace = read_trace(path)
        if split is not None:
            chosen = [number for number, of in trace.splits.items() if of == split]
            if not chosen:
                known = ", ".join(sorted(set(trace.splits.values()))) or "none"
                raise OledError(f"--split {split}: {trace.source} has no prompt in it; the splits it tells of: {known}")
            trace = trace.select(chosen)
        if not np.any(trace.phase != PREFILL):
            raise OledError(f"{trace.source} holds no decoding forwards, only prefill: nothing can be drawn from it")
        stream = Stream(trace)
        found.append(Recorded(trace, stream, _facts(name, stream, split)))
    return found


def caption(facts: Row) -> str:
    """The facts of a trace, or of a row, in words."""
    threshold = facts["threshold"]
    parts = [
        str(facts["model"]),
        f"block {facts['block_length']}",
        "threshold not told" if threshold is None else f"threshold {threshold}",
        f"batch {facts['batch']}",
        f"n = {counted(facts['prompts'], 'prompt')} and {counted(facts['forwards'], 'decoding forward')}",
        f"W {facts['W']:.1f} of {facts['experts']}",
    ]
    if facts["split"]:
        parts.append(f"{facts['split']} split")
    if facts["routing"] == "scripted":
        parts.append("routing scripted, not the model's own")
    if facts["complete"] is False:
        parts.append("recording was cut short")
    return ", ".join(parts)


def share(by_prompt: np.ndarray) -> tuple[float, float | None, float | None]:
    """``a / b`` of the sums over prompts of ``by_prompt`` ``[U, (a, b)]``, and the ends of its 95 % interval by
    bootstrap over prompts; NaN of nothing, and None for ends that there are not (fewer than two prompts have any)."""
    present = by_prompt[by_prompt[:, 1] > 0]
    part, whole = by_prompt.sum(0)
    found = bootstrap(present, lambda sums: sums[..., 0] / sums[..., 1])
    ends = (found.low, found.high) if found else (None, None)
    return (float(part / whole) if whole else math.nan, *ends)


def neighbours(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Rows of successive forwards of one block of one sequence: int64 ``[P]`` the earlier ones, and the later ones."""
    rows = np.flatnonzero(trace.phase != PREFILL)
    rows = rows[np.argsort(trace.sequence[rows], kind="stable")]
    earlier, later = rows[:-1], rows[1:]
    same = (trace.sequence[earlier] == trace.sequence[later]) & (trace.block[earlier] == trace.block[later])
    return earlier[same], later[same]


def counted_tokens(trace: Trace, row: int) -> np.ndarray:
    """Which tokens of a row count, bool ``[T]``."""
    return trace.expert_ids[row, 0, :, 0] != PADDING


def of_kind(rows: list[Row], kind: str) -> list[Row]:
    """The rows of one part of a figure."""
    return [row for row in rows if row["kind"] == kind]


def to_csv(rows: list[Row]) -> str:
    """Columns in the order in which rows name them first; a cell is empty where there is no number."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def parser_of(figure: Figure) -> Parser:
    """The command line of a script."""
    parser = Parser(prog=f"{figure.name}.py", description=figure.about)
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="trace file, .safetensors or .safetensors.gz")
    parser.add_argument("--out", default="figures", metavar="DIR", help="folder for CSV and PNG (default: figures)")
    parser.add_argument("--split", choices=("calibration", "evaluation"), help="the prompts of this split alone")
    figure.options(parser)
    return parser


def _folder(text: str) -> Path:
    """``--out``, made if it is not there."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OledError(f"--out {text!r:.200} cannot be made a folder: {reason}; name another") from None
    return Path(text)


def _name(path: str) -> str:
    name = Path(path).name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _facts(name: str, stream: Stream, split: str | None) -> Row:
    trace, about = stream.trace, stream.trace.metadata
    decoding = about.get("decoding")
    decoding = decoding if isinstance(decoding, dict) else {}
    return {
        "trace": name,
        "model": about.get("model", "model not told"),
        "routing": about.get("routing"),
        "complete": about.get("complete"),
        "split": split,
        "block_length": trace.tokens_per_row,
        "threshold": decoding.get("threshold"),
        "batch": max(forward.batch_size for forward in stream.forwards),
        "prompts": len(np.unique(trace.sequence[trace.phase != PREFILL])),
        "forwards": len(stream),
        "layers": stream.num_layers,
        "experts": stream.num_experts,
        "W": float(layer_demand(stream).mean()),
    }


def _picture(figure: Figure, groups: list[list[Row]]) -> bytes | None:
    """A PNG: a line of panels for each trace, under its caption; None without matplotlib."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "matplotlib":
            raise
        return None
    lines = [[row for group in groups for row in group]] if figure.together else groups
    canvas = Canvas(figsize=(_PANEL[0] * figure.panels, (_PANEL[1] + 0.4) * len(lines)), layout="constrained", dpi=120)
    for part, rows in zip(canvas.subfigures(len(lines), 1, squeeze=False)[:, 0], lines, strict=True):
        titles = dict.fromkeys(f"{row['trace']}: {caption(row)}" for row in rows)
        part.suptitle("\n".join(titles), fontsize=8)
        axes = part.subplots(1, figure.panels, squeeze=False)[0]
        figure.draw(axes, rows)
        for panel in axes:
            panel.grid(alpha=0.3)
    out = io.BytesIO()
    canvas.savefig(out, format="png")
    return out.getvalue()
