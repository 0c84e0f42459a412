"""Many policies at many capacities on one stream, each beside its yardsticks.

``lru`` and ``min-bypass`` are always replayed, and so is every policy without its prefetcher: what a policy's misses
mean is how much of the gap between the first two it closes, and what a prefetcher's transfers are worth is how many
misses they save its own retention.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from oled_jax.lab.replay import replay
from oled_jax.lab.results import Replay, gap_closure
from oled_jax.lab.rules import Rule, Speculative, rule_by_name, speculation_of, without_prefetching
from oled_jax.lab.statistics import bootstrap, by_unit, change, closure
from oled_jax.lab.stream import Stream
from oled_jax.lab.timeline import Setup
from oled_jax.retention.budgets import ratio_budget
from oled_jax.retention.policy import TIES, TiedPolicy

_YARDSTICKS = ("lru", "min-bypass")


class Sweep:
    """Replays of ``cases``, the policies asked for with their capacities, and of what they are compared with.

    ``on_progress(done, total)`` is told the forwards replayed, now and then. With ``ties`` a policy with a tie rule is
    replayed with all of them at capacities below the working set, where they decide much. ``demand`` float64 ``[L]``:
    how many experts each layer wants, to share out the slots of all layers in proportion (no layer gets fewer than one
    token chooses); None for equal shares. ``setup`` and ``study`` as for ``replay``. OledError as from ``replay``.
    """

    def __init__(
        self,
        stream: Stream,
        rules: Iterable[Rule],
        capacities: Sequence[int],
        *,
        setup: Setup | None = None,
        study: Stream | None = None,
        demand: np.ndarray | None = None,
        ties: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ):
        self.stream, self.setup = stream, setup
        self.budget = "uniform" if demand is None else "ratio"
        working_set = layer_demand(stream).mean()
        cases = {
            (variant.label, capacity): (variant, capacity)
            for rule in rules
            for capacity in capacities
            for variant in (tie_variants(rule) if ties and capacity < working_set else [rule])
        }
        self.cases = sorted(cases.values(), key=self._order(cases))
        needed = dict(cases)
        for rule, capacity in self.cases:
            for other in (*map(rule_by_name, _YARDSTICKS), without_prefetching(rule)):
                needed.setdefault((other.label, capacity), (other, capacity))
        self._found: dict[tuple[str, int], Replay] = {}
        total = len(needed) * len(stream)
        for key, (rule, capacity) in needed.items():
            before = len(self._found) * len(stream)
            tell = (lambda n, at=before: on_progress(at + n, total)) if on_progress else None
            budget = None if demand is None else self._shares(demand, capacity)
            self._found[key] = replay(stream, rule, capacity, tell, setup=setup, budget=budget, study=study)

    def replay_of(self, rule: Rule, capacity: int) -> Replay:
        """One of the cases, or of what they are compared with; KeyError for any other."""
        return self._found[rule.label, capacity]

    def to_json(
        self, rule: Rule, capacity: int, chosen: np.ndarray | None = None, *, intervals: bool = False, seed: int = 0
    ) -> dict[str, Any]:
        """``Replay.to_json`` of one case, of the forwards ``chosen`` (bool ``[N]``) or all, and what only a comparison
        tells. ``gap_closure`` is null where experts may run on the host, since ``min-bypass`` bounds nothing there.
        ``avoided_per_speculative``: misses that a speculative transfer saves the same retention, null without any.
        With ``intervals``, those over prompts by bootstrap."""
        one = self.replay_of(rule, capacity)
        lru, bound = (self._found[name, capacity] for name in _YARDSTICKS)
        counted = ~self.stream.prefill if chosen is None else chosen & ~self.stream.prefill
        misses, of_lru, of_bound = (int(each.misses_by_forward()[counted].sum()) for each in (one, lru, bound))
        requests = int(np.count_nonzero(self.stream.counts[counted]))
        bounded = self.setup is None or self.setup.dispatch.name == "all-device"
        closed = gap_closure(misses, of_lru, of_bound, requests) if bounded else None
        found = one.to_json(closed, chosen) | {"budget": self.budget}
        found["avoided_per_speculative"] = None
        if speculation_of(rule) is not None and found["speculative_loads"]:
            alone = self.replay_of(without_prefetching(rule), capacity).misses_by_forward()
            saved = int(alone[counted].sum()) - misses
            found["avoided_per_speculative"] = saved / found["speculative_loads"]
        if intervals:
            by_forward = [each.misses_by_forward() * counted for each in (one, lru, bound)]
            sums = by_unit(self.stream, np.stack(by_forward, axis=-1))
            sums = sums[by_unit(self.stream, counted.astype(float)) > 0]
            found["intervals"] = {
                "misses_vs_lru": _listed(bootstrap(sums, change, seed=seed)),
                "gap_closure": None if closed is None else _listed(bootstrap(sums, closure, seed=seed)),
            }
            if self.setup:
                times = np.stack([each.times.step * counted for each in (one, lru)], axis=-1)
                times = by_unit(self.stream, times)
                times = times[times.sum(-1) > 0]
                found["intervals"]["simulated_time_vs_lru"] = _listed(bootstrap(times, change, seed=seed))
        return found

    def _shares(self, demand: np.ndarray, capacity: int) -> np.ndarray:
        layers, experts, chosen = (
            self.stream.num_layers,
            self.stream.num_experts,
            self.stream.trace.expert_ids.shape[-1],
        )
        return ratio_budget(demand, layers * capacity, least=chosen, most=experts)

    @staticmethod
    def _order(cases: dict[tuple[str, int], tuple[Rule, int]]) -> Callable[[tuple[Rule, int]], tuple[int, int]]:
        """By policy as first named, then by capacity as given."""
        labels = list(dict.fromkeys(label for label, _ in cases))
        place = {key: index for index, key in enumerate(cases)}
        return lambda case: (labels.index(case[0].label), place[case[0].label, case[1]])


def layer_demand(stream: Stream) -> np.ndarray:
    """How many experts each layer wants in a decoding forward on average, float64 ``[L]``."""
    return np.count_nonzero(stream.counts[~stream.prefill], axis=-1).mean(0)


def tie_variants(rule: Rule) -> list[Rule]:
    """``rule`` with every tie rule, its own first; alone if it has none."""
    if isinstance(rule, Speculative):
        return [dataclasses.replace(rule, retention=retention) for retention in tie_variants(rule.retention)]
    if not isinstance(rule, TiedPolicy):
        return [rule]
    return [rule, *(dataclasses.replace(rule, tie=tie) for tie in TIES if tie != rule.tie)]


def _listed(interval: Any) -> dict[str, Any] | None:
    return interval and interval._asdict()
