"""What batch size and block length change: activation ratio and utilization, counted; time per token, simulated.

    python experiments/figures/fig16_batch_and_block.py TRACE... [--out DIR] [--policy oled] [--machine rtx5090]

Redraws OLED-MoE's figure 16 from traces of one model at one threshold, each of another batch size or block length.
Counts are exact; TPOT is a model of the machine that is named (``configs/machines`` says where its figures come from),
stands on axes of its own, and is called simulated everywhere. Every miss is fetched, and slots start empty.
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from typing import Any

from shared import Figure, Recorded, Row, run

from oled_jax.errors import OledError
from oled_jax.lab import Setup, replay, rule_by_name
from oled_jax.lab.machine import read_machine

SHARES = (1 / 8, 5 / 32, 1 / 4, 25 / 64, 1 / 2)  # of the experts: 32, 40, 64, 100 and 128 of 256


def options(parser: argparse.ArgumentParser) -> None:
    """Which policy on which machine."""
    parser.add_argument("--policy", default="oled", metavar="P", help="as for replay (default: oled)")
    parser.add_argument("--machine", default="rtx5090", metavar="NAME|FILE", help="as for replay (default: rtx5090)")


def check(every: list[Recorded]) -> None:
    """OledError for traces that cannot stand in one picture."""
    for name in ("model", "threshold", "layers", "experts"):
        found = sorted({str(one.facts[name]) for one in every})
        if len(found) > 1:
            raise OledError(f"the traces differ in {name} ({', '.join(found)}): give those of one at a time")
    kinds = collections.Counter((one.facts["block_length"], one.facts["batch"]) for one in every)
    (block, batch), most = kinds.most_common(1)[0]
    if most > 1:
        raise OledError(f"{most} traces are of block length {block} and batch {batch}: give one of each")


def measure(recorded: Recorded, args: argparse.Namespace) -> list[Row]:
    """A row for each capacity."""
    rule, stream = rule_by_name(args.policy), recorded.stream
    setup = Setup(read_machine(args.machine), recorded.config)
    rows = []
    for capacity in sorted({max(1, round(share * stream.num_experts)) for share in SHARES}):
        found = replay(stream, rule, capacity, setup=setup).to_json(None)
        tokens = found["generated_tokens"]
        rows.append(
            {
                "policy": found["policy"],
                "capacity": capacity,
                "capacity_per_working_set": found["capacity_per_working_set"],
                "activation_ratio": found["working_set"] / stream.num_experts,
                "tokens_per_forward": found["tokens_per_forward"],
                "u_ideal": found["u_ideal"],
                "u_slot": found["u_slot"],
                "u_res": found["u_res"],
                "misses_per_token": found["misses"] / tokens if tokens else None,
                "machine": found["machine"],
                "machine_source": found["machine_source"],
                "simulated_tpot_ms": found["simulated_tpot_ms"],
                "simulated_step_ms": found["simulated_step_ms"],
            }
        )
    return rows


def say(rows: list[Row]) -> str:
    """The ends of the capacities."""
    few, many = rows[0], rows[-1]
    return (
        f"with {few['policy']} a cache of {few['capacity']} slots a layer has {few['u_ideal']:.0%} of the hits that it "
        f"could have and one of {many['capacity']} has {many['u_ideal']:.0%}; simulated TPOT on {few['machine']} (a "
        f"model, not measured): {_milliseconds(few)} and {_milliseconds(many)}"
    )


def _milliseconds(row: Row) -> str:
    return "none, without a token" if row["simulated_tpot_ms"] is None else f"{row['simulated_tpot_ms']:.3g} ms"


def draw(axes: Sequence[Any], rows: list[Row]) -> None:
    """Shares by batch; simulated TPOT by batch; simulated TPOT by block length, the least of each capacity circled."""
    batches = collections.defaultdict(set)
    for row in rows:
        batches[row["block_length"]].add(row["batch"])
    block = max(batches, key=lambda length: (len(batches[length]), length))
    of_block = sorted((row for row in rows if row["block_length"] == block), key=lambda row: row["batch"])
    smallest = min(row["batch"] for row in rows)
    of_batch = sorted((row for row in rows if row["batch"] == smallest), key=lambda row: row["block_length"])
    capacities = sorted({row["capacity"] for row in rows})
    once = [row for row in of_block if row["capacity"] == capacities[0]]
    axes[0].plot(*_points(once, "batch", "activation_ratio"), "k--", marker="s", label="activation ratio")
    for capacity in capacities:
        mine = [row for row in of_block if row["capacity"] == capacity]
        axes[0].plot(*_points(mine, "batch", "u_ideal"), marker="o", label=f"utilization, C = {capacity}")
        axes[1].plot(*_points(mine, "batch", "simulated_tpot_ms"), marker="o", label=f"C = {capacity}")
        mine = [row for row in of_batch if row["capacity"] == capacity and row["simulated_tpot_ms"] is not None]
        axes[2].plot(*_points(mine, "block_length", "simulated_tpot_ms"), marker="o", label=f"C = {capacity}")
        if len(mine) > 1:
            least = min(mine, key=lambda row: row["simulated_tpot_ms"])
            ring = {"s": 130, "facecolors": "none", "edgecolors": "black"}
            axes[2].scatter([least["block_length"]], [least["simulated_tpot_ms"]], **ring)
    time = f"simulated TPOT, ms ({rows[0]['machine']})"
    axes[0].set(xlabel=f"batch, block {block}", ylabel="share (counted)", ylim=(0, 1.02))
    axes[1].set(xlabel=f"batch, block {block}", ylabel=time, ylim=(0, None))
    axes[2].set(xlabel=f"block length, batch {smallest}", ylabel=time, ylim=(0, None))
    for panel in axes:
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend(fontsize=7)


def _points(rows: list[Row], across: str, up: str) -> tuple[list[Any], list[Any]]:
    return [row[across] for row in rows], [row[up] for row in rows]


FIGURE = Figure(
    "fig16_batch_and_block",
    "Activation ratio, utilization and simulated time by batch size and block length.",
    measure,
    say,
    3,
    draw,
    options=options,
    together=True,
    check=check,
)

if __name__ == "__main__":
    sys.exit(run(FIGURE))
