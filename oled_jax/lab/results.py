"""What a replay found: traffic by forward and layer, its sums, and the JSON they become.

Promises: every number of a ``Replay`` is there per forward, so that any selection of forwards (decoding, one batch, one
task, one split) can be summed by the same code. Counts are exact. Whatever a machine was assumed for is named
``simulated`` and comes from ``Times``; nothing here was measured.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oled_jax.lab.stream import Stream

if TYPE_CHECKING:
    from oled_jax.lab.rules import Rule
    from oled_jax.lab.timeline import Setup

_SMALLEST_GAP = 0.01  # of the requests; a smaller difference between LRU and the bound is no yardstick


class Traffic(NamedTuple):
    """By forward and layer, int64 ``[N, L]`` each, counting experts unless said otherwise.

    ``hits``: wanted and on the device when the layer began; ``token_hits``: the same, each expert counted once per
    token that chose it; ``occupied``: slots taken before the step; ``loads``: moved to the device because they were
    missing; ``late``: missing, but a speculative transfer was already bringing them; ``hosted``: missing, and run on
    the host; ``handed``: 1 if anything of the layer ran there, hits too.

    Speculative transfers: ``speculative``, by the forward that began them; ``used``, by the first forward that hit
    them; ``wasted``, by the forward after which they were gone unused (the last, if they never went).
    ``background``: transfers that bring in what the host has just run, no part of ``speculative``, and ``late_fills``
    those of them that were late; what becomes of the others is not counted.
    ``cancelled``: predicted, but not begun before they would have been needed.
    """

    hits: np.ndarray
    token_hits: np.ndarray
    occupied: np.ndarray
    loads: np.ndarray
    late: np.ndarray
    hosted: np.ndarray
    handed: np.ndarray
    speculative: np.ndarray
    used: np.ndarray
    wasted: np.ndarray
    background: np.ndarray
    late_fills: np.ndarray
    cancelled: np.ndarray

    @classmethod
    def zeros(cls, stream: Stream) -> "Traffic":
        """Of a stream of which nothing has been replayed."""
        return cls(*(np.zeros((len(stream), stream.num_layers), np.int64) for _ in cls._fields))


class Times(NamedTuple):
    """Simulated seconds by forward, float64 ``[N]``: ``step``, ``exposed_transfer`` (what it would be less if loading
    took no time), ``exposed_host`` (what the host takes beyond the device)."""

    step: np.ndarray
    exposed_transfer: np.ndarray
    exposed_host: np.ndarray


class StepTraffic(NamedTuple):
    """Sums over all layers of the decoding forwards with one step index in their block."""

    step: int
    forwards: int
    requests: int
    hits: int


@dataclasses.dataclass(frozen=True)
class Counters:
    """Sums over forwards; every tuple has one entry per layer.

    ``capacity``: C, slots per layer on average, of which each has ``slots``; ``extra_slots``: staging room beside
    them, per layer, that a prefetcher was given. ``requests``: experts wanted; ``token_requests``: the same, each
    expert counted once per token that chose it; ``possible``: hits that the slots allow at best. The others as in
    ``Traffic``.
    """

    capacity: int
    slots: tuple[int, ...]
    extra_slots: int
    forwards: int
    requests: tuple[int, ...]
    token_requests: tuple[int, ...]
    possible: tuple[int, ...]
    hits: tuple[int, ...]
    token_hits: tuple[int, ...]
    occupied: tuple[int, ...]
    loads: tuple[int, ...]
    late: tuple[int, ...]
    hosted: tuple[int, ...]
    handed: tuple[int, ...]
    speculative: tuple[int, ...]
    used: tuple[int, ...]
    wasted: tuple[int, ...]
    background: tuple[int, ...]
    late_fills: tuple[int, ...]
    cancelled: tuple[int, ...]

    @property
    def misses(self) -> tuple[int, ...]:
        """Experts wanted and not on the device when their layer began: loaded, late (of both kinds) or hosted."""
        return tuple(wanted - hit for wanted, hit in zip(self.requests, self.hits, strict=True))

    @property
    def working_set(self) -> float:
        """W: experts that a layer wants in a forward, on average."""
        return ratio(sum(self.requests), self.forwards * len(self.requests))

    def to_json(self) -> dict[str, Any]:
        """Totals over all layers and the ratios that follow, ready for ``json.dumps``.

        ``u_ideal``, ``u_slot``, ``u_res``: hits per possible hit, per slot, per resident. ``speculative_precision``:
        used per issued, null if nothing was. Other ratios of nothing are 0.
        """
        requests, hits, misses = sum(self.requests), sum(self.hits), sum(self.misses)
        working_set, speculative = self.working_set, sum(self.speculative)
        return {
            "forwards": self.forwards,
            "requests": requests,
            "hits": hits,
            "misses": misses,
            "loads": sum(self.loads),
            "host_runs": sum(self.hosted),
            "host_layers": sum(self.handed),
            "speculative_loads": speculative,
            "speculative_used": sum(self.used),
            "speculative_late": sum(self.late),
            "speculative_wasted": sum(self.wasted),
            "speculative_cancelled": sum(self.cancelled),
            "speculative_precision": ratio(sum(self.used), speculative) if speculative else None,
            "background_loads": sum(self.background),
            "background_late": sum(self.late_fills),
            "extra_slots": self.extra_slots,
            "hit_rate": ratio(hits, requests),
            "token_requests": sum(self.token_requests),
            "token_hits": sum(self.token_hits),
            "token_hit_rate": ratio(sum(self.token_hits), sum(self.token_requests)),
            "misses_per_forward": ratio(misses, self.forwards),
            "working_set": working_set,
            "capacity_per_working_set": ratio(self.capacity, working_set),
            "u_ideal": ratio(hits, sum(self.possible)),
            "u_slot": ratio(hits, sum(self.slots) * self.forwards),
            "u_res": ratio(hits, sum(self.occupied)),
        }

    def layers_json(self) -> dict[str, list]:
        """What there is per layer."""
        working_sets = [ratio(wanted, self.forwards) for wanted in self.requests]
        return {
            "slots": list(self.slots),
            "requests": list(self.requests),
            "hits": list(self.hits),
            "misses": list(self.misses),
            "token_hits": list(self.token_hits),
            "working_set": working_sets,
            "capacity_per_working_set": [
                ratio(slots, size) for slots, size in zip(self.slots, working_sets, strict=True)
            ],
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """One policy at one capacity over one stream. ``slots`` int32 ``[L, 1]``: how the layers share the capacity;
    ``traffic``: see there; ``resident`` bool ``[L, E]`` at the end; ``extra_slots`` as in ``Counters``; ``setup`` and
    ``times``: None unless a machine was assumed."""

    rule: "Rule"
    capacity: int
    stream: Stream
    slots: np.ndarray
    traffic: Traffic
    resident: np.ndarray
    extra_slots: int = 0
    setup: "Setup | None" = None
    times: Times | None = None

    def counters(self, chosen: np.ndarray) -> Counters:
        """Sums over the forwards ``chosen`` (bool ``[N]``)."""
        counts = self.stream.counts[chosen]
        requests = np.count_nonzero(counts, axis=-1)
        sums = {
            "requests": requests,
            "token_requests": counts.sum(-1, dtype=np.int64),
            "possible": np.minimum(requests, self.slots[:, 0]),
            **{name: amounts[chosen] for name, amounts in self.traffic._asdict().items()},
        }
        totals = {name: tuple(amount.sum(0).tolist()) for name, amount in sums.items()}
        slots = tuple(self.slots[:, 0].tolist())
        return Counters(self.capacity, slots, self.extra_slots, int(np.count_nonzero(chosen)), **totals)

    @property
    def decode(self) -> Counters:
        """Of the decoding forwards."""
        return self.counters(~self.stream.prefill)

    @property
    def prefill(self) -> Counters:
        """Of the others."""
        return self.counters(self.stream.prefill)

    def misses_by_forward(self) -> np.ndarray:
        """Over all layers, int64 ``[N]``."""
        wanted = np.count_nonzero(self.stream.counts, axis=-1)
        return (wanted - self.traffic.hits).sum(-1)

    def by_step(self, chosen: np.ndarray | None = None) -> list[StepTraffic]:
        """Decoding forwards, or those of them ``chosen`` (bool ``[N]``), by their step within the block."""
        requests = np.count_nonzero(self.stream.counts, axis=-1).sum(-1)
        hits = self.traffic.hits.sum(-1)
        decoding = ~self.stream.prefill if chosen is None else chosen & ~self.stream.prefill
        found = []
        for index in np.unique(self.stream.steps[decoding]).tolist():
            mine = decoding & (self.stream.steps == index)
            amounts = int(mine.sum()), int(requests[mine].sum()), int(hits[mine].sum())
            found.append(StepTraffic(index, *amounts))
        return found

    def to_json(self, gap_closure: float | None, chosen: np.ndarray | None = None) -> dict[str, Any]:
        """Everything about decoding, then by layer and by step; ``prefill`` apart, null unless it was replayed.

        ``chosen`` bool ``[N]``: of these forwards alone, of which those of prefill do not count, and no ``prefill``.
        """
        decoding = ~self.stream.prefill if chosen is None else chosen & ~self.stream.prefill
        decode, later = self.counters(decoding), self.counters(decoding & ~self.stream.first_block)
        return {
            "policy": self.rule.label,
            "capacity": self.capacity,
            "mode": self.rule.mode,
            **decode.to_json(),
            "gap_closure": gap_closure,
            "misses_after_first_block": sum(later.misses),
            "requests_after_first_block": sum(later.requests),
            **(self._simulated(decode, decoding) if self.setup else {}),
            "layers": decode.layers_json(),
            "steps": [
                traffic._asdict() | {"misses": traffic.requests - traffic.hits} for traffic in self.by_step(decoding)
            ],
            "prefill": self.prefill.to_json() if chosen is None and self.stream.prefill.any() else None,
        }

    def _simulated(self, decode: Counters, chosen: np.ndarray) -> dict[str, Any]:
        """What the machine comes to: times in milliseconds per forward, bytes in all."""
        times = [amount[chosen].sum() for amount in self.times]
        tokens = self.stream.generated_tokens(chosen)
        moved = bytes_moved(self, decode, chosen)
        full = self.setup.full_residency_seconds(self.stream.counts[chosen]).sum()
        per_forward = [1e3 * ratio(amount, decode.forwards) for amount in times]
        return {
            "machine": self.setup.machine.name,
            "machine_source": self.setup.machine.source,
            "dispatch": self.setup.dispatch.label,
            "expert_bytes": self.setup.geometry.expert_bytes,
            "generated_tokens": tokens,
            "tokens_per_forward": ratio(tokens, decode.forwards),
            "simulated_step_ms": per_forward[0],
            "simulated_tpot_ms": 1e3 * times[0] / tokens if tokens else None,
            "simulated_exposed_transfer_ms": per_forward[1],
            "simulated_exposed_host_ms": per_forward[2],
            "simulated_regret_to_full_residency": times[0] / full - 1,
            **moved,
            "bytes_per_token": sum(moved.values()) / tokens if tokens else None,
        }


def bytes_moved(replay: Replay, decode: Counters, chosen: np.ndarray) -> dict[str, int]:
    """Bytes between host and device by kind, in the forwards ``chosen``, which ``decode`` sums up, of a timed replay.

    Activations travel for all tokens of a forward, there and back, wherever a layer runs anything on the host.
    """
    expert = replay.setup.geometry.expert_bytes
    handed = replay.traffic.handed[chosen].sum(-1)
    return {
        "demand_bytes": expert * sum(decode.loads),
        "speculative_used_bytes": expert * sum(decode.used),
        "speculative_late_bytes": expert * sum(decode.late),
        "speculative_wasted_bytes": expert * sum(decode.wasted),
        "background_bytes": expert * sum(decode.background),
        "activation_bytes": replay.setup.activation_bytes * int((handed * replay.stream.tokens[chosen]).sum()),
    }


def gap_closure(misses: int, lru: int, bound: int, requests: int) -> float | None:
    """The share of the way from LRU's misses to the bound's that a policy goes; None if that is less than 1 % of the
    requests, where a ratio would mean nothing. Above 1 only where a prefetcher moves experts before they are wanted."""
    gap = lru - bound
    return (lru - misses) / gap if gap >= _SMALLEST_GAP * requests else None


def ratio(part: float, whole: float) -> float:
    """``part / whole``, 0 of nothing."""
    return part / whole if whole else 0.0
