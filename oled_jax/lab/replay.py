"""Replay: what a policy would have missed on a recorded trace, exactly as the engine would have counted it.

All that a layer wants in a forward is requested at once, and a hit is judged against the residents before anything is
inserted; then the policy and the rule of a step (``oled_jax.retention.step``) say who stays. Slots start empty, but for
what a policy places beforehand. A replay is exact and deterministic. Every miss is fetched to the device, unless a
machine and a dispatch rule are given; then host execution and simulated time come into it (``simulation``).
"""

from collections.abc import Callable

import numpy as np

from oled_jax.arguments import is_int
from oled_jax.errors import OledError
from oled_jax.lab.keeping import Keeper, after_prefill
from oled_jax.lab.results import Replay, Traffic
from oled_jax.lab.rules import Rule, speculation_of, start
from oled_jax.lab.simulation import Simulation
from oled_jax.lab.stream import Stream
from oled_jax.lab.timeline import Setup


def replay(
    stream: Stream,
    rule: Rule,
    capacity: int,
    on_forward: Callable[[int], None] | None = None,
    *,
    setup: Setup | None = None,
    budget: np.ndarray | None = None,
    study: Stream | None = None,
) -> Replay:
    """Replays ``rule`` with ``capacity`` slots per layer, 1 to E; ``on_forward(n)`` is called after n forwards, now
    and then. ``setup``: the machine to time it on; ``budget``: slots of each layer, int32 ``[L, 1]``, in
    place of ``capacity`` each, for rules that do not share out slots by themselves; ``study``: what prefetchers learn
    from before they begin. OledError for another capacity, or a policy or a setup of another
    model."""
    if not is_int(capacity) or not 1 <= capacity <= stream.num_experts:
        raise OledError(f"capacity is {capacity!r}: give 1 to {stream.num_experts}, the experts of a layer")
    prefetch = speculation_of(rule)
    if setup:
        setup.check(stream.trace)
    elif prefetch is not None and prefetch.needs_machine:
        raise OledError(f"policy {rule.label} needs a machine to be timed on (--machine)")
    keeper, prefetcher = start(rule, stream, capacity, budget, study)
    if prefetch is None and setup is None and not keeper.pooled:
        return _replay_plain(stream, rule, capacity, keeper, on_forward)
    given = {"prefetch": prefetch, "prefetcher": prefetcher if prefetch else None, "setup": setup}
    simulation = Simulation(stream, keeper, capacity, **given)
    for forward in stream.forwards:
        simulation.serve(forward)
        _tell(on_forward, forward.index)
    simulation.finish()
    extra = prefetch.limit(capacity) if prefetch is not None and prefetch.target == "extra" else 0
    found = keeper.slots, simulation.traffic, simulation.resident, extra, setup, simulation.times
    return Replay(rule, capacity, stream, *found)


def _replay_plain(
    stream: Stream, rule: Rule, capacity: int, keeper: Keeper, on_forward: Callable[[int], None] | None
) -> Replay:
    """No time and no prefetcher: all layers of a forward at once, and little else, because this is the common case."""
    traffic = Traffic.zeros(stream)
    resident = keeper.initial(stream)
    every = slice(None)
    for forward in stream.forwards:
        index = forward.index
        counts = stream.counts[index]
        demand = counts > 0
        hit = demand & resident
        traffic.hits[index] = np.count_nonzero(hit, axis=-1)
        traffic.token_hits[index] = (counts * hit).sum(-1, dtype=np.int64)
        traffic.occupied[index] = np.count_nonzero(resident, axis=-1)
        if forward.begins:
            keeper.begin(forward)
        after = resident
        if not np.array_equal(hit, demand):  # without a miss everyone stays
            if forward.prefill and keeper.admits:
                after = after_prefill(counts, resident, keeper.slots)
            else:
                after = keeper.after(forward, every, demand, resident, demand)
        keeper.observe(forward, demand, resident, after)
        resident = after
        _tell(on_forward, index)
    traffic.loads[:] = np.count_nonzero(stream.counts, axis=-1) - traffic.hits
    return Replay(rule, capacity, stream, keeper.slots, traffic, resident)


def _tell(on_forward: Callable[[int], None] | None, index: int) -> None:
    if on_forward and index % 64 == 0:
        on_forward(index + 1)
