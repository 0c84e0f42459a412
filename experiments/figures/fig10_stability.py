"""Does a confident token keep its experts? By its status and confidence; and how busy the layers are.

    python experiments/figures/fig10_stability.py TRACE... [--out DIR]

Redraws OLED-MoE's figure 10: (a) the probability that an expert which a position chose is chosen by it again in the
next forward of the block, by the position's confidence and status after the earlier forward, over all layers; (b) how
confidences are spread; (c) the share of a layer's experts that a forward wants. Positions of the prompt in a block that
it shares with the answer are left out. Intervals are over prompts.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from shared import Figure, Recorded, Row, counted_tokens, neighbours, of_kind, run, share

from oled_jax.lab import Trace
from oled_jax.lab.overlap import STATUSES

BINS = 10


def measure(recorded: Recorded, args: argparse.Namespace) -> list[Row]:
    """Rows of kinds ``stability``, ``confidence`` and ``activation``."""
    return [*_stability(recorded.trace), *_activation(recorded)]


def _stability(trace: Trace) -> list[Row]:
    """Choices kept by positions of a status, in each bin of confidence and (kind ``stability of a status``) in all."""
    earlier, later = neighbours(trace)
    prompts, unit = np.unique(trace.sequence[earlier], return_inverse=True)
    sums = np.zeros((len(prompts), len(STATUSES), BINS, 2))  # choices kept, and positions
    for before, after, prompt in zip(earlier, later, unit, strict=True):
        known = trace.confidence[before] >= 0
        counted = counted_tokens(trace, before) & counted_tokens(trace, after) & known
        again = (trace.expert_ids[before][..., :, None] == trace.expert_ids[after][..., None, :]).any(-1).mean((0, 2))
        places = np.minimum(trace.confidence[before].astype(np.float64) * BINS, BINS - 1).astype(int)
        for number, code in enumerate(STATUSES.values()):
            mine = counted & (trace.status[before] == code)
            added = np.stack([again[mine], np.ones(np.count_nonzero(mine))], axis=-1)
            np.add.at(sums[prompt, number], places[mine], added)
    rows = []
    for number, status in enumerate(STATUSES):
        of_status = sums[:, number].sum(1)
        for place in range(BINS):
            bounds = place / BINS, (place + 1) / BINS
            rows.append(_kept("stability", status, bounds, sums[:, number, place], of_status))
        rows.append(_kept("stability of a status", status, (0.0, 1.0), of_status, of_status))
    return rows


def _kept(kind: str, status: str, bounds: tuple[float, float], sums: np.ndarray, of_status: np.ndarray) -> Row:
    """One row, from sums by prompt ``[U, (choices kept, positions)]`` of its positions, and of all of the status."""
    kept, low, high = share(sums)
    positions, whole = sums[:, 1].sum(), of_status[:, 1].sum()
    return {
        "kind": kind,
        "status": status,
        "confidence_from": bounds[0],
        "confidence_to": bounds[1],
        "kept": kept,
        "kept_low": low,
        "kept_high": high,
        "positions": int(positions),
        "share_of_status": float(positions / whole) if whole else math.nan,
    }


def _activation(recorded: Recorded) -> list[Row]:
    stream = recorded.stream
    wanted = np.count_nonzero(stream.counts[~stream.prefill], axis=-1)
    return [
        {
            "kind": "activation",
            "layer": layer,
            "wanted": float(amounts.mean()),
            "wanted_sd": float(amounts.std()),
            "activation_ratio": float(amounts.mean() / stream.num_experts),
        }
        for layer, amounts in enumerate(wanted.T)
    ]


def say(rows: list[Row]) -> str:
    """Kept choices by status, and the spread over layers."""
    totals = of_kind(rows, "stability of a status")
    kept = ", ".join(
        f"{row['kept']:.0%} when {row['status']} ({row['positions']:,} positions)" for row in totals if row["positions"]
    )
    ratios = [row["activation_ratio"] for row in of_kind(rows, "activation")]
    stays = f"of its experts a position keeps {kept} in the next forward" if kept else "no block takes two forwards"
    return f"{stays}; a forward wants {min(ratios):.0%} to {max(ratios):.0%} of a layer's experts"


def draw(axes: Sequence[Any], rows: list[Row]) -> None:
    """(a), (b) and (c)."""
    for status in STATUSES:
        bins = [row for row in of_kind(rows, "stability") if row["status"] == status]
        centres = np.asarray([(row["confidence_from"] + row["confidence_to"]) / 2 for row in bins])
        kept = np.asarray([row["kept"] for row in bins])
        ends = np.asarray(
            [[row[end] if row[end] is not None else row["kept"] for row in bins] for end in ("kept_low", "kept_high")]
        )
        axes[0].errorbar(centres, kept, np.abs(ends - kept), marker="o", capsize=2, label=status)
        axes[1].plot(centres, [row["share_of_status"] for row in bins], marker="o", label=status)
    axes[0].set(xlabel="confidence", ylabel="chance that an expert stays chosen", xlim=(0, 1), ylim=(0, 1.02))
    axes[1].set(xlabel="confidence", ylabel="share of the status's positions", xlim=(0, 1), ylim=(0, None))
    layers = of_kind(rows, "activation")
    axes[2].bar([row["layer"] for row in layers], [row["activation_ratio"] for row in layers])
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].set(xlabel="MoE layer", ylabel="activation ratio W/E")
    axes[0].legend(fontsize=8)


FIGURE = Figure(
    "fig10_stability",
    "Confidence against stability of routing by status, confidences, and activation ratio by layer.",
    measure,
    say,
    3,
    draw,
)

if __name__ == "__main__":
    sys.exit(run(FIGURE))
