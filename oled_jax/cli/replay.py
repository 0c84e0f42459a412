"""``oled-jax replay``: what retention policies would have hit and missed on a recorded trace.

A table for people; with ``--json`` one list with an object per policy and capacity, with ``--csv`` a line for each and
nothing else on standard output. Counts are exact, and no device is touched. ``lru`` and ``min-bypass`` are replayed
even if they were not asked for: how much of the gap between them a policy closes is what its misses mean.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oled_jax.errors import OledError, problem_list

if TYPE_CHECKING:
    from oled_jax.lab.replay import Replay, Rule
    from oled_jax.lab.stream import Stream

_DEFAULT_POLICIES = "lru,oled,min-bypass"
_YARDSTICKS = ("lru", "min-bypass")


def add_parser(subparsers: Any) -> None:
    """Adds ``replay`` to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="count what policies would have missed on a recorded trace",
        description="Counts what retention policies would have hit and missed on a recorded trace, without a device.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="trace file, .safetensors or .safetensors.gz")
    parser.add_argument(
        "--policies",
        action="append",
        metavar="P,P,...",
        help='such as "lru,oled:w=one,rho_in=0.5,min-bypass": name=value after a comma belongs to the policy before '
        f"it; may be repeated (default: {_DEFAULT_POLICIES})",
    )
    parser.add_argument(
        "--capacity", required=True, metavar="N,N,...", help="slots of each layer, such as 32,40,64,100,128"
    )
    parser.add_argument(
        "--include-prefill",
        action="store_true",
        help="replay prompts too, as the engine runs them (default: decoding alone, from empty slots); their counts "
        "stand apart",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON list, and nothing else")
    output.add_argument("--csv", action="store_true", help="print comma-separated values, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax replay``; returns the exit code."""
    from oled_jax.lab.stream import Stream
    from oled_jax.lab.trace import read_trace

    rules = _rules(args.policies or [_DEFAULT_POLICIES])
    capacities = _capacities(args.capacity)
    stream = Stream(read_trace(args.trace), include_prefill=args.include_prefill)
    _check_capacities(capacities, stream.num_experts)
    results = _replays(stream, rules, capacities)
    if args.json:
        print(json.dumps(results))
    elif args.csv:
        _print_csv(results)
    else:
        print(_heading(stream, results[0]))
        print(table(results))
    return 0


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each object of ``Replay.to_json``."""
    width = max(len("policy"), *(len(result["policy"]) for result in results))
    lines = [
        f"{'policy':<{width}}  capacity  cap/W        hits      misses  hit rate  U_ideal  U_slot   U_res  gap closure"
    ]
    for result in results:
        closure = "-" if result["gap_closure"] is None else f"{result['gap_closure']:.3f}"
        lines.append(
            f"{result['policy']:<{width}}  {result['capacity']:>8}  {result['capacity_per_working_set']:>5.2f}  "
            f"{result['hits']:>10,}  {result['misses']:>10,}  {result['hit_rate']:>8.1%}  {result['u_ideal']:>7.1%}  "
            f"{result['u_slot']:>6.1%}  {result['u_res']:>6.1%}  {closure:>11}"
        )
    return "\n".join(lines)


def _heading(stream: "Stream", result: dict[str, Any]) -> str:
    from oled_jax.progress import counted

    lines = [
        f"{counted(result['forwards'], 'decoding forward')}, {counted(stream.num_layers, 'layer')} of "
        f"{stream.num_experts} experts, {result['requests']:,} requests, W {result['working_set']:.1f}"
    ]
    if result["prefill"] is not None:
        prefill = result["prefill"]
        lines.append(
            f"{counted(prefill['forwards'], 'forward')} of prefill before and between them, "
            f"{prefill['requests']:,} requests, in no line below"
        )
    return "\n".join([*lines, ""])


def _replays(stream: "Stream", rules: list["Rule"], capacities: list[int]) -> list[dict[str, Any]]:
    """The results in the order asked for, by policy, then by capacity."""
    from oled_jax.lab.replay import gap_closure, replay, rule_by_name
    from oled_jax.progress import ProgressLine

    every = {rule.label: rule for rule in (*map(rule_by_name, _YARDSTICKS), *rules)}
    # Progress is told in bytes of routing gone through, once for each replay.
    per_replay, total = stream.counts.nbytes, stream.counts.nbytes * len(every) * len(capacities)
    found: dict[tuple[str, int], Replay] = {}
    line = ProgressLine("replaying")
    line(0, total)
    try:
        for label, rule in every.items():
            for capacity in capacities:
                before = len(found) * per_replay
                found[label, capacity] = replay(
                    stream, rule, capacity, lambda n, at=before: line(at + n * per_replay // len(stream), total)
                )
    finally:
        line.close()
    misses = {key: sum(each.decode.misses) for key, each in found.items()}
    results = []
    for rule in rules:
        for capacity in capacities:
            one = found[rule.label, capacity]
            lru, bound = (misses[name, capacity] for name in _YARDSTICKS)
            requests = sum(one.decode.requests)
            results.append(one.to_json(gap_closure(misses[rule.label, capacity], lru, bound, requests)))
    return results


def _print_csv(results: list[dict[str, Any]]) -> None:
    """The figures of the objects that are no lists or objects themselves; prefill's under names of their own."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    rows = []
    for result in results:
        row = {
            name: value for name, value in result.items() if not isinstance(value, list | dict) and name != "prefill"
        }
        rows.append(row | {f"prefill_{name}": value for name, value in (result["prefill"] or {}).items()})
    writer.writerow(rows[0])
    writer.writerows(["" if value is None else value for value in row.values()] for row in rows)


def _rules(texts: list[str]) -> list["Rule"]:
    """The policies that were asked for, each once; OledError with everything that is wrong with them."""
    from oled_jax.lab.replay import rule_by_name, split_rules

    rules: dict[str, Rule] = {}
    problems = []
    for text in (part for given in texts for part in split_rules(given)):
        try:
            rule = rule_by_name(text)
            rules.setdefault(rule.label, rule)
        except OledError as error:
            problems.append(str(error))
    if problems:
        raise OledError(problem_list("--policies", problems) if len(problems) > 1 else f"--policies: {problems[0]}")
    return list(rules.values())


def _capacities(text: str) -> list[int]:
    """The numbers of ``--capacity``, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise OledError(f"--capacity {text!r:.200}: give numbers of slots separated by commas, such as 32,40,64")
    return list(dict.fromkeys(map(int, parts)))


def _check_capacities(capacities: list[int], num_experts: int) -> None:
    wrong = [capacity for capacity in capacities if not 1 <= capacity <= num_experts]
    if wrong:
        raise OledError(
            f"--capacity {', '.join(map(str, wrong))}: the layers of this trace have {num_experts} experts each; give "
            f"1 to {num_experts}"
        )
