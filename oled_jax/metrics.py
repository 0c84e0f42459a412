"""Every number the system reports about itself, in one place; serialises to JSON.

Times are wall-clock seconds of this process. Compilation is kept apart, so that a rate is never that of a compiler.
Counts of experts follow the definitions of the laboratory: all experts that a layer wants in one forward are requested
at once, and a hit is one that was resident before the forward began. Prefill is kept apart from decoding (denoising
forwards and those that write a block's keys and values).
"""

import dataclasses
from typing import Any, Protocol

import numpy as np

from oled_jax.retention.record import StepRecord


@dataclasses.dataclass(frozen=True)
class ExpertTraffic:
    """Sums over the forwards of one phase; every tuple has one entry per MoE layer.

    ``requests``: experts wanted; ``hits``: of these, resident; ``token_requests``, ``token_hits``: the same, each
    expert counted once per token that chose it; ``loads``: experts moved from host to device memory; ``rounds``:
    products over the slots, one per forward unless a layer wanted more experts than fit at once.
    """

    forwards: int
    requests: tuple[int, ...]
    hits: tuple[int, ...]
    token_requests: tuple[int, ...]
    token_hits: tuple[int, ...]
    loads: tuple[int, ...]
    rounds: tuple[int, ...]

    @property
    def misses(self) -> tuple[int, ...]:
        """Experts wanted and not resident, by layer."""
        return tuple(wanted - hit for wanted, hit in zip(self.requests, self.hits, strict=True))

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were resident, over all layers; 1 if none was wanted."""
        return sum(self.hits) / sum(self.requests) if sum(self.requests) else 1.0

    @property
    def token_hit_rate(self) -> float:
        """The same, each expert weighted by the tokens that chose it."""
        return sum(self.token_hits) / sum(self.token_requests) if sum(self.token_requests) else 1.0

    @property
    def working_set(self) -> float:
        """W: experts that a layer wants in a forward, on average."""
        return sum(self.requests) / max(1, self.forwards * len(self.requests))

    def to_json(self) -> dict[str, Any]:
        """All fields and what follows from them, ready for ``json.dumps``."""
        derived = ("misses", "hit_rate", "token_hit_rate", "working_set")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclasses.dataclass(frozen=True)
class ExpertMetrics:
    """What placement did during one generation.

    ``experts_on_device``: N, slots per layer (all experts at full residency); ``policy`` and ``form`` are None at full
    residency; ``expert_bytes``: of one expert; ``resident``: expert ids that lay in the slots at the end, by layer;
    ``manager_seconds``: what the retention manager took on the host between forwards (0 where the step itself decides);
    ``routing``: "router", or "scripted" where a trace took the router's place and answers mean nothing.
    """

    num_experts: int
    experts_on_device: int
    policy: str | None
    form: str | None
    expert_bytes: int
    prefill: ExpertTraffic
    decode: ExpertTraffic
    resident: tuple[tuple[int, ...], ...]
    manager_seconds: float
    routing: str = "router"

    @property
    def bytes_moved(self) -> int:
        """Bytes loaded from host to device memory while decoding."""
        return sum(self.decode.loads) * self.expert_bytes

    @property
    def slots_per_working_set(self) -> float:
        """N / W while decoding."""
        return self.experts_on_device / self.decode.working_set if self.decode.working_set else 0.0

    @property
    def manager_ms_per_forward(self) -> float:
        """Milliseconds of the manager per forward of either phase."""
        return 1e3 * self.manager_seconds / max(1, self.prefill.forwards + self.decode.forwards)

    def to_json(self) -> dict[str, Any]:
        """All fields and what follows from them, ready for ``json.dumps``."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"prefill": self.prefill.to_json(), "decode": self.decode.to_json()}
        derived = ("bytes_moved", "slots_per_working_set", "manager_ms_per_forward")
        return {**fields, **{name: getattr(self, name) for name in derived}}


@dataclasses.dataclass(frozen=True)
class GenerationMetrics:
    """What one generated sequence cost. In a batch, times and expert counts are those of the whole batch.

    ``num_forwards`` counts the denoising forwards that the decoding rule consumed (as the reference counts them),
    ``num_commits`` the forwards that only rewrote the KV of a finished block, ``masks_left`` the masks that decoding
    left in the answer (possible in 2.0 when ``steps`` runs out).
    """

    prompt_tokens: int
    generated_tokens: int
    num_forwards: int
    num_commits: int
    num_blocks: int
    masks_left: int
    batch_size: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    experts: ExpertMetrics

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens per denoising forward."""
        return self.generated_tokens / max(1, self.num_forwards)

    @property
    def ms_per_forward(self) -> float:
        """Milliseconds per forward of the decode phase, commits included."""
        return 1e3 * self.decode_seconds / max(1, self.num_forwards + self.num_commits)

    @property
    def ms_per_token(self) -> float:
        """TPOT: milliseconds of decoding per generated token (prefill and compilation excluded)."""
        return 1e3 * self.decode_seconds / max(1, self.generated_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding (prefill and compilation excluded)."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def manager_share(self) -> float:
        """The retention manager's part of the time of prefill and decoding, from 0 to 1."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.experts.manager_seconds / seconds if seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields and the derived rates, ready for ``json.dumps``."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rates = ("tokens_per_forward", "ms_per_forward", "ms_per_token", "tokens_per_second", "manager_share")
        return {**fields, "experts": self.experts.to_json(), **{name: getattr(self, name) for name in rates}}


class Placement(Protocol):
    """What the counter asks of a runner."""

    @property
    def slots(self) -> int | None:
        """Slots per layer; None if all experts are resident."""
        ...

    @property
    def policy_label(self) -> str | None: ...

    @property
    def form(self) -> str | None: ...

    @property
    def routing(self) -> str: ...


class TrafficCounter:
    """Adds up records, forward by forward. Counters are int64 ``[phase, L]``, phase 0 being prefill."""

    def __init__(self, num_layers: int, num_experts: int):
        self._num_experts = num_experts
        self._forwards = [0, 0]
        self._sums = {
            name: np.zeros((2, num_layers), np.int64)
            for name in ("requests", "hits", "token_requests", "token_hits", "loads", "rounds")
        }
        self._resident = np.zeros((num_layers, num_experts), bool)

    def add(self, record: StepRecord, rounds: np.ndarray) -> None:
        """Takes one forward in (numpy arrays); ``rounds`` int ``[L]``."""
        phase = int(np.any(record.phase > 0))
        wanted = record.counts > 0
        hits = wanted & record.resident
        requested, hit = wanted.sum(axis=1), hits.sum(axis=1)
        self._forwards[phase] += 1
        amounts = {
            "requests": requested,
            "hits": hit,
            "token_requests": record.counts.sum(axis=1),
            "token_hits": (record.counts * hits).sum(axis=1),
            "loads": requested - hit,
            "rounds": rounds,
        }
        for name, amount in amounts.items():
            self._sums[name][phase] += amount
        self._resident = (record.resident & ~record.evicted) | record.admitted

    def metrics(self, placement: Placement, expert_bytes: int, manager_seconds: float) -> ExpertMetrics:
        """The sums so far."""
        prefill, decode = (
            ExpertTraffic(
                forwards=self._forwards[phase],
                **{name: tuple(sums[phase].tolist()) for name, sums in self._sums.items()},
            )
            for phase in (0, 1)
        )
        return ExpertMetrics(
            num_experts=self._num_experts,
            experts_on_device=self._num_experts if placement.slots is None else placement.slots,
            policy=placement.policy_label,
            form=placement.form,
            expert_bytes=expert_bytes,
            prefill=prefill,
            decode=decode,
            resident=tuple(tuple(np.flatnonzero(layer).tolist()) for layer in self._resident),
            manager_seconds=manager_seconds,
            routing=placement.routing,
        )
