"""Policies of the laboratory by name: retention, retention with a prefetcher, whole systems, and bounds.

``lru``, ``oled:w=one`` and so on name a retention policy; ``min-bypass``, ``belady`` a bound; ``last-step:m=2`` the
prefetcher of that name with ``lru``, and ``oled:w=one+last-step:m=2`` with another policy; ``moe-infinity`` a system
with a retention of its own.
"""

import dataclasses
import re

import numpy as np

from oled_jax.errors import OledError
from oled_jax.lab.bounds import BOUNDS, Bound
from oled_jax.lab.commit_ahead import CommitAhead
from oled_jax.lab.finemoe import FineMoe
from oled_jax.lab.keeping import Keeper, keeper_of
from oled_jax.lab.moe_infinity import MoeInfinity
from oled_jax.lab.pool import LruGlobal, MoeInfinityLfu, PoolOnly
from oled_jax.lab.prefetch import LastStep, OracleNext, Prefetch, Prefetcher, Speculation, System
from oled_jax.lab.stream import Stream
from oled_jax.parameters import from_text
from oled_jax.retention import RetentionPolicy, policy_by_name, policy_names
from oled_jax.retention.policy import slots_array

_PREFETCHERS = {kind.name: kind for kind in (LastStep, OracleNext, CommitAhead)}
_SYSTEMS = {kind.name: kind for kind in (LruGlobal, MoeInfinity, MoeInfinityLfu, FineMoe)}
_DEFAULT_RETENTION = "lru"
# Known from the literature, and impossible to replay from what a trace holds.
_NOT_FROM_TRACES = {"gate-ahead": "it applies the next layer's router to hidden states, which a trace does not hold"}


@dataclasses.dataclass(frozen=True)
class Speculative:
    """A retention policy and a prefetcher beside it."""

    retention: RetentionPolicy
    prefetch: Prefetch

    @property
    def label(self) -> str:
        """The text that ``rule_by_name`` reads back."""
        of_retention = self.retention.label
        return self.prefetch.label if of_retention == _DEFAULT_RETENTION else f"{of_retention}+{self.prefetch.label}"

    @property
    def mode(self) -> str:
        """That of the retention policy."""
        return self.retention.mode


Rule = RetentionPolicy | Bound | Speculative | System


def start(
    rule: Rule, stream: Stream, capacity: int, budget: np.ndarray | None = None, study: Stream | None = None
) -> tuple[Keeper, Prefetcher | None]:
    """``rule`` at work on ``stream``; OledError if one of its tables is of another model. ``budget``: slots of each
    layer, int32 ``[L, 1]``, for rules that do not share out slots by themselves. ``study``: what a prefetcher learns
    from before it begins."""
    if isinstance(rule, System):
        return rule.start(stream, capacity, study)
    if isinstance(rule, Speculative):
        return keeper_of(rule.retention, stream, capacity, budget), rule.prefetch.start(stream, study)
    if isinstance(rule, Bound):
        return rule.keeper(stream, slots_array(stream.num_layers, capacity if budget is None else budget, np)), None
    return keeper_of(rule, stream, capacity, budget), None


def speculation_of(rule: Rule) -> Speculation | None:
    """The prefetcher of ``rule``, if it has one."""
    if isinstance(rule, Speculative):
        return rule.prefetch
    return rule if isinstance(rule, System) and rule.prefetches else None


def without_prefetching(rule: Rule) -> Rule:
    """``rule`` without its prefetcher; ``lru``, where its retention cannot do without."""
    if isinstance(rule, PoolOnly):
        return rule
    if isinstance(rule, System):
        return MoeInfinityLfu() if isinstance(rule, MoeInfinity) else policy_by_name(_DEFAULT_RETENTION)
    return rule.retention if isinstance(rule, Speculative) else rule


def rule_names() -> tuple[str, ...]:
    """The names that ``rule_by_name`` knows."""
    return (*policy_names(), *_PREFETCHERS, *_SYSTEMS, *BOUNDS)


def rule_by_name(text: str) -> Rule:
    """A retention policy as ``policy_by_name`` reads it, a bound, or a prefetcher with one; OledError otherwise."""
    before, plus, prefetcher = _parted(text)
    missing = _NOT_FROM_TRACES.get((prefetcher if plus else text).partition(":")[0].strip())
    if missing:
        raise OledError(f"policy {text!r} cannot be replayed: {missing}")
    if plus:
        retention = rule_by_name(before)
        if not isinstance(retention, RetentionPolicy):
            raise OledError(f"policy {text!r}: {before!r} takes no prefetcher; a retention policy does, such as lru")
        return Speculative(retention, from_text(prefetcher, _PREFETCHERS, "prefetchers"))
    name, colon, _ = (part.strip() for part in text.partition(":"))
    if name in BOUNDS:
        if colon:
            raise OledError(f"policy {text!r}: {name} has no parameters")
        return BOUNDS[name]
    if name in _PREFETCHERS:
        return Speculative(policy_by_name(_DEFAULT_RETENTION), from_text(text, _PREFETCHERS, "prefetchers"))
    if name in _SYSTEMS:
        return from_text(text, _SYSTEMS, "systems")
    if name not in policy_names():
        raise OledError(f"unknown policy {name!r}: the policies are {', '.join(rule_names())}")
    return policy_by_name(text)


def split_rules(text: str) -> list[str]:
    """The policies of a comma-separated list; ``name=value`` after a comma is a parameter of the policy before it."""
    rules: list[str] = []
    for part in text.split(","):
        if rules and "=" in part.partition(":")[0]:
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    return rules


def _parted(text: str) -> tuple[str, bool, str]:
    """What stands before and after the last plus that begins a name; file names and numbers may hold others."""
    found = list(re.finditer(r"\+(?=\s*([a-z][a-z-]*)\s*(:|$))", text))
    if not found:
        return text, False, ""
    return text[: found[-1].start()], True, text[found[-1].end() :]
