"""Replay: what a policy would have missed on a recorded trace, exactly as the engine would have counted it.

All that a layer wants in a forward is requested at once, and a hit is judged against the residents before anything is
inserted; then the policy and the rule of a step (``oled_jax.retention.step``) say who stays. Every miss is fetched to
the device and counts as a load. Slots start empty, but for what a policy places beforehand. A replay is exact and
deterministic; it knows no time, no bandwidth and no host execution.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from oled_jax.arguments import is_int
from oled_jax.errors import OledError
from oled_jax.lab.bounds import BOUNDS, Bound
from oled_jax.lab.keeping import after_prefill, keeper_of
from oled_jax.lab.stream import Stream
from oled_jax.retention import RetentionPolicy, policy_by_name, policy_names

Rule = RetentionPolicy | Bound
_SMALLEST_GAP = 0.01  # of the requests; a smaller difference between LRU and the bound is no yardstick


class StepTraffic(NamedTuple):
    """Sums over all layers of the decoding forwards with one step index in their block."""

    step: int
    forwards: int
    requests: int
    hits: int


@dataclasses.dataclass(frozen=True)
class Counters:
    """Sums over forwards; every tuple has one entry per layer.

    ``requests``: experts wanted; ``hits``: of these, resident; ``token_requests``, ``token_hits``: the same, each
    expert counted once per token that chose it; ``possible``: hits that C slots allow at best, min(C, wanted);
    ``occupied``: experts resident before a forward. ``capacity``: C.
    """

    capacity: int
    forwards: int
    requests: tuple[int, ...]
    hits: tuple[int, ...]
    token_requests: tuple[int, ...]
    token_hits: tuple[int, ...]
    possible: tuple[int, ...]
    occupied: tuple[int, ...]

    @property
    def misses(self) -> tuple[int, ...]:
        """Experts wanted and not resident."""
        return tuple(wanted - hit for wanted, hit in zip(self.requests, self.hits, strict=True))

    @property
    def loads(self) -> tuple[int, ...]:
        """Experts moved to the device because they were missing: all misses."""
        return self.misses

    @property
    def working_set(self) -> float:
        """W: experts that a layer wants in a forward, on average."""
        return _ratio(sum(self.requests), self.forwards * len(self.requests))

    def to_json(self) -> dict[str, Any]:
        """Totals over all layers and the ratios that follow, ready for ``json.dumps``.

        ``u_ideal``, ``u_slot``, ``u_res``: hits per possible hit, per slot, per resident. Ratios of nothing are 0.
        """
        requests, hits, misses = sum(self.requests), sum(self.hits), sum(self.misses)
        working_set = self.working_set
        return {
            "forwards": self.forwards,
            "requests": requests,
            "hits": hits,
            "misses": misses,
            "loads": sum(self.loads),
            "speculative_loads": 0,
            "hit_rate": _ratio(hits, requests),
            "token_requests": sum(self.token_requests),
            "token_hits": sum(self.token_hits),
            "token_hit_rate": _ratio(sum(self.token_hits), sum(self.token_requests)),
            "misses_per_forward": _ratio(misses, self.forwards),
            "working_set": working_set,
            "capacity_per_working_set": _ratio(self.capacity, working_set),
            "u_ideal": _ratio(hits, sum(self.possible)),
            "u_slot": _ratio(hits, self.capacity * self.forwards * len(self.requests)),
            "u_res": _ratio(hits, sum(self.occupied)),
        }

    def layers_json(self) -> dict[str, list]:
        """What there is per layer."""
        working_sets = [_ratio(wanted, self.forwards) for wanted in self.requests]
        return {
            "requests": list(self.requests),
            "hits": list(self.hits),
            "misses": list(self.misses),
            "token_hits": list(self.token_hits),
            "working_set": working_sets,
            "capacity_per_working_set": [_ratio(self.capacity, size) for size in working_sets],
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """One policy at one capacity over one stream. int64 ``[N, L]``, by forward: ``hits``, ``token_hits`` and
    ``occupied`` as in ``Counters``; ``resident`` bool ``[L, E]`` at the end."""

    rule: Rule
    capacity: int
    stream: Stream
    hits: np.ndarray
    token_hits: np.ndarray
    occupied: np.ndarray
    resident: np.ndarray

    def counters(self, chosen: np.ndarray) -> Counters:
        """Sums over the forwards ``chosen`` (bool ``[N]``)."""
        counts = self.stream.counts[chosen]
        requests = np.count_nonzero(counts, axis=-1)
        sums = {
            "requests": requests,
            "hits": self.hits[chosen],
            "token_requests": counts.sum(-1, dtype=np.int64),
            "token_hits": self.token_hits[chosen],
            "possible": np.minimum(requests, self.capacity),
            "occupied": self.occupied[chosen],
        }
        totals = {name: tuple(amount.sum(0).tolist()) for name, amount in sums.items()}
        return Counters(self.capacity, int(np.count_nonzero(chosen)), **totals)

    @property
    def decode(self) -> Counters:
        """Of the decoding forwards."""
        return self.counters(~self.stream.prefill)

    @property
    def prefill(self) -> Counters:
        """Of the others."""
        return self.counters(self.stream.prefill)

    def by_step(self) -> list[StepTraffic]:
        """Decoding forwards by their step within the block."""
        requests = np.count_nonzero(self.stream.counts, axis=-1).sum(-1)
        hits, decode = self.hits.sum(-1), ~self.stream.prefill
        traffic = []
        for index in np.unique(self.stream.steps[decode]).tolist():
            mine = decode & (self.stream.steps == index)
            amounts = int(mine.sum()), int(requests[mine].sum()), int(hits[mine].sum())
            traffic.append(StepTraffic(index, *amounts))
        return traffic

    def to_json(self, gap_closure: float | None) -> dict[str, Any]:
        """Everything about decoding, then by layer and by step; ``prefill`` apart, null unless it was replayed."""
        decode = self.decode
        return {
            "policy": self.rule.label,
            "capacity": self.capacity,
            "mode": self.rule.mode,
            **decode.to_json(),
            "gap_closure": gap_closure,
            "layers": decode.layers_json(),
            "steps": [traffic._asdict() | {"misses": traffic.requests - traffic.hits} for traffic in self.by_step()],
            "prefill": self.prefill.to_json() if self.stream.prefill.any() else None,
        }


def replay(stream: Stream, rule: Rule, capacity: int, on_forward: Callable[[int], None] | None = None) -> Replay:
    """Replays ``rule`` with ``capacity`` slots per layer, 1 to E; ``on_forward(n)`` is called after n forwards, now
    and then. OledError for another capacity, or a policy whose table is of another model."""
    if not is_int(capacity) or not 1 <= capacity <= stream.num_experts:
        raise OledError(f"capacity is {capacity!r}: give 1 to {stream.num_experts}, the experts of a layer")
    keeper = rule.keeper(stream, capacity) if isinstance(rule, Bound) else keeper_of(rule, stream, capacity)
    sums = [np.zeros((len(stream), stream.num_layers), np.int64) for _ in range(3)]
    hits, token_hits, occupied = sums
    resident = keeper.initial(stream)
    for forward in stream.forwards:
        index = forward.index
        counts = stream.counts[index]
        demand = counts > 0
        hit = demand & resident
        hits[index] = np.count_nonzero(hit, axis=-1)
        token_hits[index] = (counts * hit).sum(-1, dtype=np.int64)
        occupied[index] = np.count_nonzero(resident, axis=-1)
        if forward.begins:
            keeper.begin(forward)
        after = resident
        if not np.array_equal(hit, demand):  # without a miss everyone stays
            if forward.prefill and keeper.admits:
                after = after_prefill(counts, resident, capacity)
            else:
                after = keeper.after(forward, demand, resident)
        keeper.observe(forward, demand, resident, after)
        resident = after
        if on_forward and index % 64 == 0:
            on_forward(index + 1)
    return Replay(rule, capacity, stream, *sums, resident)


def gap_closure(misses: int, lru: int, bound: int, requests: int) -> float | None:
    """The share of the way from LRU's misses to the bound's that a policy goes; None if that is less than 1 % of the
    requests, where a ratio would mean nothing."""
    gap = lru - bound
    return (lru - misses) / gap if gap >= _SMALLEST_GAP * requests else None


def rule_names() -> tuple[str, ...]:
    """The names that ``rule_by_name`` knows."""
    return (*policy_names(), *BOUNDS)


def rule_by_name(text: str) -> Rule:
    """A retention policy as ``policy_by_name`` reads it, or a bound; OledError for anything else."""
    name, colon, _ = (part.strip() for part in text.partition(":"))
    if name in BOUNDS:
        if colon:
            raise OledError(f"policy {text!r}: {name} has no parameters")
        return BOUNDS[name]
    if name not in policy_names():
        raise OledError(f"unknown policy {name!r}: the policies are {', '.join(rule_names())}")
    return policy_by_name(text)


def split_rules(text: str) -> Iterable[str]:
    """The policies of a comma-separated list; ``name=value`` after a comma is a parameter of the policy before it."""
    rules: list[str] = []
    for part in text.split(","):
        if rules and "=" in part.partition(":")[0]:
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    return rules


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
