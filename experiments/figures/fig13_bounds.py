"""Misses of policies and of the bound over capacities, as multiples of the working set.

    python experiments/figures/fig13_bounds.py TRACE... [--out DIR] [--split evaluation] [--policies P,P,...] [--ties]

Redraws OLED-MoE's figure 13: how far policies are from ``min-bypass``, which no policy without prefetching can beat.
What is replayed, and how, says ``misses.py``.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import misses
from shared import Figure, Recorded, Row, run

TARGETS = (0.2, 0.3, 0.43, 0.6, 0.72, 0.83, 1.0, 1.15, 1.3, 1.5, 1.73, 2.0)


def measure(recorded: Recorded, args: argparse.Namespace) -> list[Row]:
    """See ``misses.measure``."""
    return misses.measure(recorded, args, TARGETS)


def say(rows: list[Row]) -> str:
    """Where the largest share of the gap is closed, and by whom; what the bound leaves of LRU's misses near W."""
    capacities = sorted({row["capacity_per_working_set"] for row in rows})
    over = f"over capacities of {capacities[0]:.2f} to {capacities[-1]:.2f} W"
    closed = [row for row in misses.comparable(rows) if row["gap_closure"] is not None]
    if not closed:
        return f"{over} there is no gap between lru and min-bypass of 1 % of the requests, or no policy was asked for"
    best = max(closed, key=lambda row: row["gap_closure"])
    return (
        f"{over} the largest share of the gap between lru and min-bypass is closed by {best['policy']} at "
        f"{best['capacity_per_working_set']:.2f} W: {best['gap_closure']:.2f}{_span(best)}; {misses.NOTE}"
    )


def _span(row: Row) -> str:
    if row["gap_closure_low"] is None:
        return ", no interval"
    return f" [{row['gap_closure_low']:.2f}, {row['gap_closure_high']:.2f}]"


def draw(axes: Sequence[Any], rows: list[Row]) -> None:
    """Misses per request; the gap closed."""
    misses.lines(axes[0], rows, "misses_per_request")
    axes[0].set(ylabel="demand misses per request", ylim=(0, None))
    axes[0].legend(fontsize=7)
    misses.lines(axes[1], [row for row in rows if row["policy"] not in ("lru", "min-bypass")], "gap_closure")
    axes[1].axhline(0, color="black", linewidth=0.8)
    axes[1].set(ylabel="gap closure, lru = 0, min-bypass = 1")
    bottom = axes[1].get_ylim()[0]
    axes[1].set_ylim(max(bottom, -1.5), 1.02)


FIGURE = Figure(
    "fig13_bounds",
    "Misses of policies beside lru and min-bypass over capacities.",
    measure,
    say,
    2,
    draw,
    options=misses.add_options,
)

if __name__ == "__main__":
    sys.exit(run(FIGURE))
