"""The table of the verdict: misses and gap closure at the capacities, per working set, that both papers speak of.

    python experiments/figures/table_capw.py TRACE... [--out DIR] [--split evaluation] [--policies P,P,...] [--ties]

Capacities come from the trace's own W, rounded to whole slots; the second line of the table says what they came to.
Each cell: demand misses per forward (over all layers), below it the gap closed, with its 95 % interval over prompts,
and for prefetchers the speculative loads per forward.
What is replayed, and how, says ``misses.py``.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import misses
from shared import Figure, Recorded, Row, run

TARGETS = (0.43, 0.6, 0.83, 1.0, 1.3, 1.73)


def measure(recorded: Recorded, args: argparse.Namespace) -> list[Row]:
    """See ``misses.measure``."""
    return misses.measure(recorded, args, TARGETS)


def say(rows: list[Row]) -> str:
    """Who misses least at each capacity, of what can be built and starts from empty slots."""
    best = []
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in misses.comparable(rows) if row["target"] == target]
        if own:
            least = min(own, key=lambda row: row["misses"])
            speculative = " (by prefetching)" if least["speculative_loads"] else ""
            best.append(f"{least['policy']}{speculative} at {target:g}")
    absent = [f"{target:g}" for target in TARGETS if target not in {row["target"] for row in rows}]
    without = f"; {', '.join(absent)} W would be more than there are experts" if absent else ""
    return f"the fewest demand misses at a capacity, in W: {', '.join(best) or 'no policy'}{without}; {misses.NOTE}"


def table(rows: list[Row]) -> str:
    """Policies down, capacities across."""
    targets = sorted({row["target"] for row in rows})
    of = {(row["policy"], row["target"]): row for row in rows}
    first = next(iter(misses.by_policy(rows)))
    text = [
        ["cap/W asked", *(f"{target:g}" for target in targets)],
        [
            "slots, cap/W",
            *(f"{of[first, t]['capacity']}, {of[first, t]['capacity_per_working_set']:.2f}" for t in targets),
        ],
    ]
    for policy in misses.by_policy(rows):
        mine = [of.get((policy, target)) for target in targets]  # a tie rule is replayed below W alone
        text.append(
            [
                policy + misses.mark(next(row for row in mine if row)),
                *("" if row is None else f"{row['misses_per_forward']:.2f}" for row in mine),
            ]
        )
        if policy not in ("lru", "min-bypass"):
            text.append(["  gap closure", *(_closure(row) for row in mine)])
        if any(row and row["speculative_loads"] for row in mine):
            loads = [row and f"{row['speculative_loads'] / row['forwards']:.2f}" for row in mine]
            text.append(["  speculative", *(amount or "" for amount in loads)])
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{'>' if place else '<'}{width}}"
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in text
    )


def _closure(row: Row | None) -> str:
    if row is None:
        return ""
    if row["gap_closure"] is None:
        return "-"
    low, high = row["gap_closure_low"], row["gap_closure_high"]
    return f"{row['gap_closure']:.2f}" + ("" if low is None else f" [{low:.2f},{high:.2f}]")


def draw(axes: Sequence[Any], rows: list[Row]) -> None:
    """Misses beside LRU's; the gap closed."""
    others = [row for row in rows if row["policy"] != "lru"]
    misses.lines(axes[0], others, "misses_vs_lru", intervals=True)
    axes[0].set(ylabel="demand misses, relative to lru's")
    axes[0].legend(fontsize=7)
    misses.lines(axes[1], [row for row in others if row["policy"] != "min-bypass"], "gap_closure", intervals=True)
    axes[1].set(ylabel="gap closure (95 % intervals)")
    axes[1].set_ylim(max(axes[1].get_ylim()[0], -1.5), 1.02)
    for panel in axes:
        panel.axhline(0, color="black", linewidth=0.8)


FIGURE = Figure(
    "table_capw",
    "Misses and gap closure of policies at chosen capacities per working set.",
    measure,
    say,
    2,
    draw,
    options=misses.add_options,
    show=table,
)

if __name__ == "__main__":
    sys.exit(run(FIGURE))
