"""What policies miss over capacities that are chosen from a trace's own working set: rows for several figures.

Replays as ``oled-jax replay`` does them: decoding forwards alone, from empty slots that one prompt hands to the next,
every miss fetched to the device. Counts are exact. A policy
that starts with experts in its slots (``start`` is ``filled``) is spared their first misses, and may stand below the
bound. Of a prefetcher the misses are those of demand, and what it moved
to save them stands beside them. ``gap_closure`` is the share of the way from ``lru`` to ``min-bypass``, none where
that way is shorter than 1 % of the requests; intervals are over prompts, paired.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from shared import Recorded, Row

from oled_jax.lab import BOUNDS, Sweep, rule_by_name
from oled_jax.lab.rules import Rule, split_rules
from oled_jax.progress import ProgressLine

POLICIES = "lru,last-step,tide:start=empty,lfuda,oled,status:mode=select,min-bypass"
NOTE = (
    "slots start empty, except of policies marked * (filled); every miss is fetched, and a prefetch lands at once, "
    "since no machine is assumed"
)
_STYLES = {"lru": {"color": "black"}, "min-bypass": {"color": "black", "linestyle": "--"}}
_KEPT = (
    "policy",
    "mode",
    "capacity",
    "capacity_per_working_set",
    "requests",
    "misses",
    "misses_per_forward",
    "misses_after_first_block",
    "hit_rate",
    "u_ideal",
    "speculative_loads",
    "speculative_precision",
    "gap_closure",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which policies, with which tie rules."""
    parser.add_argument("--policies", default=POLICIES, metavar="P,P,...", help=f"as for replay (default: {POLICIES})")
    parser.add_argument(
        "--ties", action="store_true", help="below the working set, replay policies with every tie rule: id, load, hash"
    )


def rules_of(args: argparse.Namespace) -> list[Rule]:
    """The policies that were asked for; OledError for one that is unknown."""
    return [rule_by_name(text) for text in split_rules(args.policies)]


def measure(recorded: Recorded, args: argparse.Namespace, targets: Sequence[float]) -> list[Row]:
    """A row for every policy at every capacity that is nearest to one of ``targets``, capacities per working set.

    Those beyond the experts of a layer are left out. Column ``target`` is what was asked for,
    ``capacity_per_working_set`` what it came to.
    """
    stream, working_set = recorded.stream, recorded.facts["W"]
    wanted = {target: max(1, round(target * working_set)) for target in targets}
    wanted = {target: slots for target, slots in wanted.items() if slots <= stream.num_experts}
    line = ProgressLine(f"replaying {recorded.facts['trace']}")
    scale = stream.counts.nbytes // len(stream)  # progress is told in bytes of routing gone through
    line(0, 1)
    try:
        capacities = sorted(set(wanted.values()))
        sweep = Sweep(
            stream,
            rules_of(args),
            capacities,
            ties=args.ties,
            on_progress=lambda done, total: line(done * scale, total * scale),
        )
    finally:
        line.close()
    rows = []
    for rule, capacity in sweep.cases:
        found = sweep.to_json(rule, capacity, intervals=True)
        row = {name: found[name] for name in _KEPT}
        row["start"] = "filled" if sweep.replay_of(rule, capacity).traffic.occupied[0].any() else "empty"
        row["misses_per_request"] = found["misses"] / found["requests"]
        of_lru = sum(sweep.replay_of(rule_by_name("lru"), capacity).decode.misses)
        row["misses_vs_lru"] = found["misses"] / of_lru - 1 if of_lru else None
        for name, interval in found["intervals"].items():
            row |= {f"{name}_{end}": interval and interval[end] for end in ("low", "high")}
        rows += [{"target": target} | row for target, slots in wanted.items() if slots == capacity]
    return rows


def comparable(rows: list[Row]) -> list[Row]:
    """Rows of what can be built and starts as ``min-bypass`` does, from empty slots."""
    return [row for row in rows if row["start"] == "empty" and row["policy"] not in BOUNDS]


def mark(row: Row) -> str:
    """An asterisk behind the name of a policy that starts filled."""
    return "" if row["start"] == "empty" else "*"


def by_policy(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each policy, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["policy"], []).append(row)
    return found


def lines(panel: Any, rows: list[Row], column: str, *, intervals: bool = False) -> None:
    """A line for each policy over cap/W, the bars its interval; a policy without a number at a capacity has a gap."""
    for policy, mine in by_policy(rows).items():
        label = policy + mark(mine[0])
        mine = sorted((row for row in mine if row[column] is not None), key=lambda row: row["capacity"])
        ratios, values = [row["capacity_per_working_set"] for row in mine], [row[column] for row in mine]
        style = {"marker": "o", "markersize": 3, "label": label, **_STYLES.get(policy, {})}
        if intervals and mine and all(row[f"{column}_low"] is not None for row in mine):
            ends = [[abs(row[column] - row[f"{column}_{end}"]) for row in mine] for end in ("low", "high")]
            panel.errorbar(ratios, values, ends, capsize=2, **style)
        else:
            panel.plot(ratios, values, **style)
    filled = any(row["start"] == "filled" for row in rows)
    panel.set_xlabel("capacity / W" + (" (* starts with filled slots)" if filled else ""))
