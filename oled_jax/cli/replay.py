"""``oled-jax replay``: what policies would have hit and missed on a recorded trace, and what that costs on a machine.

A table for people; with ``--json`` one list with an object per policy and capacity, with ``--csv`` a line for each and
nothing else on standard output. Counts are exact, and no device is touched; whatever is named ``simulated`` is a model
of the machine that was named. ``lru`` and ``min-bypass`` are replayed even if they were not asked for: how much of the
gap between them a policy closes is what its misses mean.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oled_jax.assets import model_folder
from oled_jax.errors import OledError, problem_list

if TYPE_CHECKING:
    from oled_jax.config import ModelConfig
    from oled_jax.lab.rules import Rule
    from oled_jax.lab.stream import Stream
    from oled_jax.lab.timeline import Setup
    from oled_jax.lab.trace import Trace

_DEFAULT_POLICIES = "lru,oled,min-bypass"


def add_parser(subparsers: Any) -> None:
    """Adds ``replay`` to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="count what policies would have missed on a recorded trace",
        description="Counts what policies would have hit, missed and moved on a recorded trace, without a device.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="trace file, .safetensors or .safetensors.gz")
    parser.add_argument(
        "--policies",
        action="append",
        metavar="P,P,...",
        help='such as "lru,oled:w=one,rho_in=0.5,min-bypass": name=value after a comma belongs to the policy before '
        'it; "status+last-step:m=2" is a policy with a prefetcher; may be repeated '
        f"(default: {_DEFAULT_POLICIES})",
    )
    parser.add_argument(
        "--policy-file",
        action="append",
        default=[],
        metavar="FILE.toml",
        help="retention policies from a file with a table [[policy]] for each: name and parameters; may be repeated",
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
    parser.add_argument(
        "--ties",
        action="store_true",
        help="below the working set, where ties decide, replay policies with every tie rule: id, load and hash",
    )
    parser.add_argument(
        "--budget",
        choices=("uniform", "ratio"),
        default="uniform",
        help="how layers share the slots: equally (default), or in proportion to the experts that they want, as known "
        "from --study, or without it from the replayed prompts themselves",
    )
    _add_selection_options(parser)
    _add_machine_options(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON list, and nothing else")
    output.add_argument("--csv", action="store_true", help="print comma-separated values, and nothing else")


def _add_selection_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--split", choices=("calibration", "evaluation"), help="replay the prompts of this split alone")
    group.add_argument(
        "--study",
        choices=("calibration", "evaluation"),
        help="prompts that prefetchers learn from before they begin, never counted (default: none)",
    )
    group.add_argument("--by-task", action="store_true", help="count each task apart, too, within the one replay")
    group.add_argument(
        "--intervals",
        action="store_true",
        help="95%% intervals over prompts, of misses against lru and of the gap closure (bootstrap, 10,000 resamples)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the resamples (default: 0)")


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulated time")
    group.add_argument("--machine", metavar="NAME|FILE", help="machine that ships with the package, or a .toml file")
    group.add_argument(
        "--dispatch",
        metavar="RULE",
        help="which misses run on the host, such as oled or fiddler; needs --machine (default: all-device)",
    )
    group.add_argument(
        "--link-slowdown",
        type=float,
        default=1.0,
        metavar="R",
        help="every transfer takes R times as long (default: 1)",
    )
    group.add_argument(
        "--model",
        metavar="PRESET|PATH",
        type=model_folder,
        help="preset or config.json of the model whose experts move (default: the one that the trace tells of, else "
        "the preset with as many layers and experts)",
    )


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax replay``; returns the exit code."""
    from oled_jax.lab.statistics import tasks_of
    from oled_jax.lab.stream import Stream
    from oled_jax.lab.sweep import Sweep, layer_demand
    from oled_jax.lab.trace import read_trace
    from oled_jax.progress import ProgressLine

    if args.study is not None and args.study == args.split:
        raise OledError(f"--study {args.study}: these are the prompts that are replayed; study the others")
    if not args.trace:
        raise OledError("TRACE is empty: give the path of a trace file")
    rules = _rules(args)
    capacities = _capacities(args.capacity)
    _check_seed(args.seed)
    machine = _machine(args)
    trace = read_trace(args.trace)
    setup = _setup(args, trace, *machine) if machine else None
    stream = Stream(_selected(trace, "--split", args.split), include_prefill=args.include_prefill)
    study = (
        Stream(_selected(trace, "--study", args.study), include_prefill=args.include_prefill) if args.study else None
    )
    _check_capacities(capacities, stream.num_experts)
    tasks = tasks_of(stream) if args.by_task else {}
    if args.by_task and not tasks:
        raise OledError(f"--by-task: {trace.source} tells of no tasks; record it with prompts that have them")
    per_forward = stream.counts.nbytes // len(stream)  # progress is told in bytes of routing gone through
    line = ProgressLine("replaying")
    line(0, 1)
    try:
        sweep = Sweep(
            stream,
            rules,
            capacities,
            setup=setup,
            study=study,
            demand=layer_demand(study or stream) if args.budget == "ratio" else None,
            ties=args.ties,
            on_progress=lambda done, total: line(done * per_forward, total * per_forward),
        )
    finally:
        line.close()
    options = {"intervals": args.intervals, "seed": args.seed}
    results = []
    for rule, capacity in sweep.cases:
        results.append(sweep.to_json(rule, capacity, **options) | ({"task": None} if tasks else {}))
        for task, chosen in tasks.items():
            results.append(sweep.to_json(rule, capacity, chosen, **options) | {"task": task})
    if args.json:
        print(json.dumps(results))
    elif args.csv:
        _print_csv(results)
    else:
        print(_heading(stream, results[0], setup))
        print(table(results))
    return 0


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each object of ``Sweep.to_json``; columns that would say nothing are left out."""
    columns = [("policy", "<", [result["policy"] for result in results])]
    if "task" in results[0]:
        columns.append(("task", "<", [result["task"] or "all" for result in results]))
    columns += [
        (title, ">", [form(result) for result in results])
        for title, form in (
            ("capacity", lambda r: str(r["capacity"])),
            ("cap/W", lambda r: f"{r['capacity_per_working_set']:.2f}"),
            ("hits", lambda r: f"{r['hits']:,}"),
            ("misses", lambda r: f"{r['misses']:,}"),
            ("hit rate", lambda r: f"{r['hit_rate']:.1%}"),
            ("U_ideal", lambda r: f"{r['u_ideal']:.1%}"),
            ("U_slot", lambda r: f"{r['u_slot']:.1%}"),
            ("U_res", lambda r: f"{r['u_res']:.1%}"),
        )
    ]
    if any(result["speculative_loads"] for result in results):
        columns.append(("speculative", ">", [f"{result['speculative_loads']:,}" for result in results]))
        columns.append(("used", ">", [_share(result["speculative_precision"]) for result in results]))
    if "machine" in results[0]:
        columns.append(("on host", ">", [f"{result['host_runs']:,}" for result in results]))
        columns.append(("sim. step", ">", [f"{result['simulated_step_ms']:.2f} ms" for result in results]))
        columns.append(("sim. TPOT", ">", [_milliseconds(result["simulated_tpot_ms"]) for result in results]))
    if "intervals" in results[0]:
        columns.append(("misses vs lru", ">", [_interval(result["intervals"]["misses_vs_lru"]) for result in results]))
    columns.append(
        ("gap closure", ">", ["-" if r["gap_closure"] is None else f"{r['gap_closure']:.3f}" for r in results])
    )
    if "intervals" in results[0]:
        columns.append(("(95%)", ">", [_span(result["intervals"]["gap_closure"]) for result in results]))
    lines = []
    for row in zip(*([title, *cells] for title, _, cells in columns), strict=True):
        widths = [max(len(title), *map(len, cells)) for title, _, cells in columns]
        parts = zip(row, columns, widths, strict=True)
        lines.append("  ".join(f"{cell:{align}{width}}" for cell, (_, align, _), width in parts))
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _interval(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['estimate']:+.1%} [{found['low']:+.1%}, {found['high']:+.1%}]"


def _span(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"[{found['low']:.3f}, {found['high']:.3f}]"


def _heading(stream: "Stream", result: dict[str, Any], setup: "Setup | None") -> str:
    from oled_jax.progress import counted, format_bytes

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
    if setup:
        lines.append(
            f"times simulated for {setup.machine.name} ({setup.machine.source}), dispatch {setup.dispatch.label}, "
            f"experts of {format_bytes(setup.geometry.expert_bytes)}, {result['generated_tokens']:,} tokens"
        )
    return "\n".join([*lines, ""])


def _print_csv(results: list[dict[str, Any]]) -> None:
    """The figures of the objects that are no lists or objects themselves; prefill's and the intervals' under names of
    their own. A cell is empty where there is no figure."""
    rows = []
    for result in results:
        row = {name: value for name, value in result.items() if not isinstance(value, list | dict)}
        row.pop("prefill", None)
        row |= {f"prefill_{name}": value for name, value in (result["prefill"] or {}).items()}
        for name, interval in result.get("intervals", {}).items():
            ends = interval or {"low": None, "high": None, "units": None}
            row |= {f"{name}_{end}": ends[end] for end in ("low", "high", "units")}
        rows.append({name: "" if value is None else value for name, value in row.items()})
    writer = csv.DictWriter(sys.stdout, rows[0], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _rules(args: argparse.Namespace) -> list["Rule"]:
    """The policies that were asked for, each once; OledError with everything that is wrong with them."""
    from oled_jax.lab.rules import rule_by_name, split_rules
    from oled_jax.retention import policies_from_toml

    rules: dict[str, Rule] = {}
    problems = []
    given = args.policies or ([] if args.policy_file else [_DEFAULT_POLICIES])
    for text in (part for texts in given for part in split_rules(texts)):
        try:
            rule = rule_by_name(text)
            rules.setdefault(rule.label, rule)
        except OledError as error:
            problems.append(str(error))
    if problems:
        raise OledError(problem_list("--policies", problems) if len(problems) > 1 else f"--policies: {problems[0]}")
    for file in args.policy_file:
        for rule in policies_from_toml(file):
            rules.setdefault(rule.label, rule)
    return list(rules.values())


def _selected(trace: "Trace", option: str, split: str | None) -> "Trace":
    """The sequences of a split, or all."""
    if split is None:
        return trace
    chosen = [number for number, of in trace.splits.items() if of == split]
    if not chosen:
        known = ", ".join(sorted(set(trace.splits.values()))) or "none"
        raise OledError(f"{option} {split}: {trace.source} has no sequence in it; the splits that it tells of: {known}")
    return trace.select(chosen)


def _machine(args: argparse.Namespace) -> tuple[Any, Any] | None:
    """The machine and the dispatch rule; OledError if one of them is unknown or makes no sense without the other."""
    from oled_jax.dispatch import ALL_DEVICE, dispatch_by_name
    from oled_jax.lab.machine import read_machine

    dispatch = ALL_DEVICE if args.dispatch is None else dispatch_by_name(args.dispatch)
    if args.machine is None:
        needing = {"--dispatch": dispatch != ALL_DEVICE, "--link-slowdown": args.link_slowdown != 1}
        for option in (option for option, given in needing.items() if given):
            raise OledError(f"{option} needs --machine, whose times it goes by")
        return None
    machine = read_machine(args.machine)
    return machine if args.link_slowdown == 1 else machine.slower_link(args.link_slowdown), dispatch


def _setup(args: argparse.Namespace, trace: "Trace", machine: Any, dispatch: Any) -> "Setup":
    from oled_jax.lab.timeline import Setup

    setup = Setup(machine, _config(args.model, trace), dispatch)
    setup.check(trace)
    return setup


def _config(given: str | None, trace: "Trace") -> "ModelConfig":
    from oled_jax.config import ModelConfig, preset_names

    if given is not None:
        return ModelConfig.from_preset(given) if given in preset_names() else _config_at(given)
    described = trace.metadata.get("config")
    if isinstance(described, dict):
        return ModelConfig.from_hf(described)
    for config in map(ModelConfig.from_preset, preset_names()):  # those of one geometry have experts of one size
        if (len(config.moe_layers), config.num_experts) == (trace.num_layers, trace.num_experts):
            return config
    raise OledError(f"{trace.source} does not tell of its model: name it (--model PRESET or a config.json)")


def _config_at(path: str) -> "ModelConfig":
    from oled_jax.config import ModelConfig, preset_names

    if not path or not Path(path).exists():
        raise OledError(
            f"--model {path!r:.200} is neither a file nor a preset: the presets are {', '.join(preset_names())}"
        )
    return ModelConfig.from_hf(Path(path))


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


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise OledError(f"--seed is {seed}: give a number that is not negative")
