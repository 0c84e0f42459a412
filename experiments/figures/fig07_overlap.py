"""How much of what a forward asks for was asked for before: by distance in steps, at block boundaries, by status.

    python experiments/figures/fig07_overlap.py TRACE... [--out DIR]

Redraws the middle and the right part of OLED-MoE's figure 7. Its left part, the similarity of hidden states, is left
out: a trace holds none. Means over layers and pairs of forwards, each sequence by itself; intervals are of the recall,
over prompts. Recall is the hit rate of a cache that holds what the earlier forward asked for, and nothing else.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from shared import Figure, Recorded, Row, of_kind, run, share

from oled_jax.lab import Stream
from oled_jax.lab.overlap import Overlap, at_boundaries, by_gap, by_status
from oled_jax.retention.record import PREFILL

GAPS = range(1, 9)
MEASURES = ("jaccard", "recall", "cosine")


def measure(recorded: Recorded, args: argparse.Namespace) -> list[Row]:
    """A row for every gap, boundary and status, over all layers and by layer."""
    trace = recorded.trace
    numbers = np.unique(trace.sequence[trace.phase != PREFILL]).tolist()
    found: dict[tuple[str, str], list[Overlap]] = {}
    for stream in (Stream(trace.select([number])) for number in numbers):
        for gap in GAPS:
            found.setdefault(("gap", str(gap)), []).append(by_gap(stream, gap))
        for name, overlap in at_boundaries(stream).items():
            found.setdefault(("boundary", name), []).append(overlap)
        for name, overlap in by_status(stream).items():
            found.setdefault(("status", name), []).append(overlap)
    rows = []
    for (kind, which), overlaps in found.items():
        pairs = np.stack([overlap.pairs for overlap in overlaps])
        sums = {name: np.nan_to_num(np.stack([getattr(each, name) for each in overlaps])) * pairs for name in MEASURES}
        for layer in ("all", *range(recorded.stream.num_layers)):
            chosen = slice(None) if layer == "all" else [layer]
            row = {"kind": kind, "which": which, "layer": layer, "pairs": int(pairs[:, chosen].sum())}
            whole = pairs[:, chosen].sum(-1)
            for name, amount in sums.items():
                row[name] = float(amount[:, chosen].sum() / whole.sum()) if whole.sum() else math.nan
            if layer == "all":
                by_prompt = np.stack([sums["recall"].sum(-1), whole], axis=-1)
                row["recall_low"], row["recall_high"] = share(by_prompt)[1:]
            rows.append(row)
    return rows


def say(rows: list[Row]) -> str:
    """The recalls that the hypotheses on blocks ask for."""
    recall = {row["which"]: row["recall"] for row in rows if row["layer"] == "all"}
    pairs = next(row["pairs"] for row in rows if (row["which"], row["layer"]) == ("last to first", "all"))
    longest = max((gap for gap in GAPS if not math.isnan(recall[str(gap)])), default=None)
    if longest is None:
        return "no block takes two forwards, so that nothing overlaps inside one"
    across = (
        f"the first forward of a block finds {recall['last to first']:.0%} of its own among those of the last forward "
        f"of the block before, {_percent(recall, 'last masked to first')} among those of the last one with a mask and "
        f"{recall['first to first']:.0%} among those of its first forward"
        if pairs
        else "there is no boundary between blocks"
    )
    return (
        f"a forward finds {recall['1']:.0%} of its experts among those of the forward before in its block, "
        f"{recall[str(longest)]:.0%} among those of {longest} before; {across}; the similarity of hidden states is "
        "left out, since traces hold none"
    )


def _percent(recall: dict[str, float], which: str) -> str:
    return "none" if math.isnan(recall[which]) else f"{recall[which]:.0%}"


def draw(axes: Sequence[Any], rows: list[Row]) -> None:
    """By gap, at boundaries, by status."""
    rows = [row for row in rows if row["layer"] == "all"]
    for name in MEASURES:
        gaps = of_kind(rows, "gap")
        axes[0].plot([int(row["which"]) for row in gaps], [row[name] for row in gaps], marker="o", label=name)
    axes[0].set(xlabel="steps apart, inside a block", ylabel="overlap, mean", ylim=(0, 1.02))
    axes[0].legend()
    for panel, kind, label in zip(
        axes[1:], ("boundary", "status"), ("from block to block", "one step apart"), strict=True
    ):
        chosen = of_kind(rows, kind)
        for place, name in enumerate(MEASURES):
            panel.bar(np.arange(len(chosen)) + (place - 1) * 0.27, [row[name] for row in chosen], 0.25, label=name)
        panel.set_xticks(range(len(chosen)), [row["which"].replace(" to ", "\nto ") for row in chosen], fontsize=8)
        panel.set(xlabel=label, ylim=(0, 1.02))


FIGURE = Figure(
    "fig07_overlap", "Overlap of routing by step gap, at block boundaries and by status.", measure, say, 3, draw
)

if __name__ == "__main__":
    sys.exit(run(FIGURE))
