"""What a forward of block diffusion asks of the experts, beside one token at a time.

    python experiments/figures/fig04_footprint.py TRACE... [--out DIR]

Redraws OLED-MoE's figure 4. No autoregressive model is run: the proxy (block length 1) is what single tokens of the
same trace asked for, which per layer is exactly K experts; what successive single tokens share is taken from the
forwards that write a block's keys and values, in which every position is a word. Bytes are those of the experts that a
forward uses, wherever they lie, and no transfers; FLOPs are the two of each multiply-add of the routed experts' three
matrices. Shared experts, attention and all else are excluded. Traces of batch 1 only.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from shared import Figure, Recorded, Row, counted_tokens, neighbours, run

from oled_jax.errors import OledError
from oled_jax.lab.machine import Geometry
from oled_jax.retention.record import KV_WRITE

WANTED, FLOPS = "experts of a layer per forward", "expert FLOPs per forward"
NEW, BLOCK = "new experts of a layer from one forward to the next", "distinct experts of a layer over a block"
BYTES, TOKENS = "expert bytes per forward", "generated tokens per forward"
BYTES_PER_TOKEN, FLOPS_PER_TOKEN = "expert bytes per generated token", "expert FLOPs per generated token"


def measure(recorded: Recorded, args: argparse.Namespace) -> list[Row]:
    """A row for each quantity: of the trace, of the proxy, and their ratio."""
    stream, config = recorded.stream, recorded.config
    if recorded.facts["batch"] > 1:
        raise OledError(f"{recorded.trace.source} has batches of {recorded.facts['batch']}: give one of batch 1")
    layers, chosen = stream.num_layers, recorded.trace.expert_ids.shape[-1]
    if (layers, stream.num_experts) != (len(config.moe_layers), config.num_experts):
        raise OledError(f"{recorded.trace.source} is of another geometry than the model that it names")
    expert_bytes = Geometry.of(config).expert_bytes
    expert_flops = 6 * config.hidden_size * config.moe_intermediate_size
    wanted = recorded.facts["W"]
    choices = stream.counts.sum(dtype=np.int64) / len(stream)
    tokens = stream.generated_tokens(np.ones(len(stream), bool)) / len(stream)
    single = layers * chosen
    pairs = {
        WANTED: (wanted, chosen),
        BYTES: (layers * wanted * expert_bytes, single * expert_bytes),
        FLOPS: (choices * expert_flops, single * expert_flops),
        NEW: _new_experts(recorded),
        BLOCK: _over_blocks(recorded),
        TOKENS: (tokens, 1.0),
    }
    pairs[BYTES_PER_TOKEN], pairs[FLOPS_PER_TOKEN] = (
        (pairs[name][0] / tokens if tokens else math.nan, pairs[name][1]) for name in (BYTES, FLOPS)
    )
    return [
        {
            "quantity": name,
            "diffusion": float(diffusion),
            "single_token_proxy": float(proxy),
            "ratio": float(diffusion / proxy) if proxy else math.nan,
        }
        for name, (diffusion, proxy) in pairs.items()
    ]


def _new_experts(recorded: Recorded) -> tuple[float, float]:
    """Wanted and not wanted one forward, or one token, before: means over layers."""
    trace = recorded.trace
    of_forwards = [
        _demand(trace, later) & ~_demand(trace, earlier) for earlier, later in zip(*neighbours(trace), strict=True)
    ]
    of_tokens = []
    for row in np.flatnonzero(trace.phase == KV_WRITE):
        ids = trace.expert_ids[row][:, counted_tokens(trace, row)]
        known = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(-1)
        of_tokens.append((~known).sum(-1).mean(0))
    return _mean([new.sum(-1).mean() for new in of_forwards]), _mean(np.concatenate(of_tokens) if of_tokens else [])


def _over_blocks(recorded: Recorded) -> tuple[float, float]:
    """Over all forwards of a block, and over its tokens one by one: means over layers and finished blocks."""
    trace = recorded.trace
    of_forwards, of_tokens = [], []
    for row in np.flatnonzero(trace.phase == KV_WRITE):
        mine = np.flatnonzero(
            (trace.sequence == trace.sequence[row]) & (trace.block == trace.block[row]) & (trace.phase > 0)
        )
        of_forwards.append(np.any([_demand(trace, other) for other in mine], axis=0).sum(-1).mean())
        of_tokens.append(_demand(trace, row).sum(-1).mean())
    return _mean(of_forwards), _mean(of_tokens)


def _demand(trace: Any, row: int) -> np.ndarray:
    """The experts that a row wants, bool ``[L, E]``."""
    ids = trace.expert_ids[row][:, counted_tokens(trace, row)].reshape(trace.num_layers, -1)
    found = np.zeros((trace.num_layers, trace.num_experts), bool)
    np.put_along_axis(found, ids.astype(np.int64), True, axis=-1)
    return found


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def say(rows: list[Row]) -> str:
    """The three ratios of the figure."""
    ratio = {row["quantity"]: row["ratio"] for row in rows}
    of = {row["quantity"]: row["diffusion"] for row in rows}
    return (
        f"a forward uses {of[WANTED]:.1f} experts of a layer, {ratio[WANTED]:.1f} times those of a single token, and "
        f"{ratio[FLOPS]:.1f} times its expert FLOPs; at {of[TOKENS]:.2f} generated tokens per forward (those that only "
        f"write keys and values counted) that is {ratio[BYTES_PER_TOKEN]:.2f} times the expert bytes per token; the "
        "autoregressive side is a proxy, single tokens of this trace, and no model was run"
    )


def draw(axes: Sequence[Any], rows: list[Row]) -> None:
    """Experts; bytes; FLOPs."""
    of = {row["quantity"]: row for row in rows}
    shown = (
        ("experts of a layer", 1, {WANTED: "per forward", NEW: "new per forward", BLOCK: "over a block"}),
        ("MB of routed experts", 1e6, {BYTES: "per forward", BYTES_PER_TOKEN: "per token"}),
        ("GFLOP of routed experts", 1e9, {FLOPS: "per forward", FLOPS_PER_TOKEN: "per token"}),
    )
    columns = ((-0.2, "diffusion", "block diffusion"), (0.2, "single_token_proxy", "single-token proxy"))
    for panel, (unit, scale, names) in zip(axes, shown, strict=True):
        for place, column, label in columns:
            panel.bar(np.arange(len(names)) + place, [of[name][column] / scale for name in names], 0.38, label=label)
        panel.set_xticks(range(len(names)), names.values(), fontsize=8)
        panel.set_ylabel(unit)
    axes[0].legend(fontsize=8)


FIGURE = Figure(
    "fig04_footprint", "Experts, bytes and FLOPs per forward, beside single tokens as a proxy.", measure, say, 3, draw
)

if __name__ == "__main__":
    sys.exit(run(FIGURE))
