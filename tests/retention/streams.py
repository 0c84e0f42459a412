"""Random demand streams, and one loop that drives any policy over them in numpy or jitted."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from oled_jax.retention import Routing, StepRecord, demand_counts, step

LAYERS, EXPERTS, TOKENS, CHOSEN, SEQUENCES = 2, 16, 6, 3, 2


class Forward(NamedTuple):
    """One forward of a stream: what is known before its sampling, and what after it."""

    before: Routing
    after: Routing
    sequence: np.ndarray
    block: np.ndarray
    step: np.ndarray
    phase: np.ndarray


def make_stream(seed: int, forwards: int, *, grid: int = 0) -> list[Forward]:
    """``forwards`` forwards of two sequences: experts that stay from forward to forward more often than not, blocks
    that end, rows that do not count, at times a prefill. With ``grid``, weights and confidences are multiples of
    1/grid, so that sums are often equal and always exact."""
    rng = np.random.default_rng(seed)
    row = np.repeat(np.arange(SEQUENCES), TOKENS // SEQUENCES).astype(np.int32)
    sequence, block, step_in_block = np.array([0, 1]), np.zeros(2, int), np.zeros(2, int)
    ids = choose(rng, TOKENS)
    status, confidence = np.zeros(TOKENS, np.uint8), np.full(TOKENS, -1, np.float32)
    stream = []
    for index in range(forwards):
        phase = np.where(rng.random(2) < 0.15, 2, 1) * (rng.random() >= 0.15)  # 0: a prefill
        ids = np.where(rng.random((LAYERS, TOKENS, 1)) < 0.5, choose(rng, TOKENS), ids)
        given = np.where(rng.random((1, TOKENS, 1)) < 0.1, -1, ids).astype(np.int32)
        weights = rng.random(ids.shape).astype(np.float32)
        fresh = rng.random(TOKENS).astype(np.float32)
        if grid:
            weights, fresh = np.float32(np.round(weights * grid) / grid), np.float32(np.round(fresh * grid) / grid)
        tokens = rng.integers(0, 5, TOKENS).astype(np.int32)
        before = Routing(given, weights, row, confidence, status, tokens)
        committing = (status == 0) & (rng.random(TOKENS) < 0.3)
        status = np.where(status == 1, 2, np.where(committing, 1, status)).astype(np.uint8)
        after = Routing(given, weights, row, fresh, status, tokens)
        narrow = [x.astype(np.int32) for x in (sequence, block, step_in_block, phase)]
        stream.append(Forward(before, after, *narrow))
        confidence, step_in_block = fresh, step_in_block + 1
        for s in range(SEQUENCES):
            if rng.random() < 0.25:  # the next block, or another sequence in this row
                sequence, block, step_in_block = sequence.copy(), block.copy(), step_in_block.copy()
                block[s], step_in_block[s] = block[s] + 1, 0
                if rng.random() < 0.3:
                    sequence[s], block[s] = 10 + index * SEQUENCES + s, 0
                status = np.where(row == s, 0, status).astype(np.uint8)
                confidence = np.where(row == s, np.float32(-1), confidence)
    return stream


def choose(rng, tokens: int) -> np.ndarray:
    """Distinct experts for every token, int ``[L, T, K]``."""
    return np.argsort(rng.random((LAYERS, tokens, EXPERTS)))[..., :CHOSEN]


def one_forward(policy, state, resident, capacity, index, forward, layers, xp):
    """One forward of ``policy``: state and residents after it, and all that it decided. ``layers`` lists the layers, or
    is ``[slice(None)]`` to take them all at once."""
    counts = demand_counts(forward.before.ids, EXPERTS, xp)
    gates = policy.gates(state, forward.before, EXPERTS, xp)
    if gates is None:
        gates = xp.zeros_like(counts)
    plans, outcomes = [], []
    for layer in layers:
        here = (counts[layer] > 0, counts[layer], gates[layer], resident[layer])
        plans.append(policy.plan(state, layer, *here, xp))
        outcome = step(resident[layer], here[0], plans[-1], capacity, xp, mode=policy.mode, contested=policy.contested)
        outcomes.append(outcome)
    plan, outcome = (
        kind(*(xp.stack(parts).reshape(LAYERS, EXPERTS) for parts in zip(*answers, strict=True)))
        for kind, answers in ((type(plans[0]), plans), (type(outcomes[0]), outcomes))
    )
    record = StepRecord(index, *forward[2:], counts, resident, outcome.admitted, outcome.evicted, forward.after)
    return policy.observe(state, record, xp), outcome.resident, (gates, plan, outcome)


@functools.cache
def compiled(policy, by_layer: bool):
    layers = list(range(LAYERS)) if by_layer else [slice(None)]

    def forward(state, resident, capacity, index, forward):
        return one_forward(policy, state, resident, capacity, index, forward, layers, jnp)

    # Half the time to compile: the loops stay plain, and what is rewritten before them is rewritten all the same.
    return jax.jit(forward, compiler_options={"xla_backend_optimization_level": 0})


def run(policy, stream, capacity: int, xp=np, *, by_layer=False, residents=None):
    """Drives ``policy`` over ``stream``; yields ``(state, resident before, (gates, plan, outcome))`` per forward, the
    state being that after the forward."""
    state = policy.init(LAYERS, EXPERTS, capacity, xp, sequences=SEQUENCES)
    resident = policy.initial_residents(LAYERS, EXPERTS, capacity) if residents is None else residents
    for index, forward in enumerate(stream):
        before = resident
        if xp is np:
            layers = list(range(LAYERS)) if by_layer else [slice(None)]
            state, resident, decided = one_forward(policy, state, resident, capacity, index, forward, layers, np)
        else:
            state, resident, decided = compiled(policy, by_layer)(state, resident, capacity, index, forward)
        yield state, before, decided


def outcomes(policy, stream, capacity: int, **options):
    """What the step did, forward by forward."""
    return [decided[2] for _, _, decided in run(policy, stream, capacity, **options)]


def in_mode(policy, mode: str):
    """The same policy in another mode."""
    return dataclasses.replace(policy, mode=mode)


@st.composite
def streams(draw):
    """Streams with and without frequent equalities."""
    return make_stream(draw(st.integers(0, 2**31)), draw(st.integers(1, 8)), grid=draw(st.sampled_from([0, 4])))


capacities = st.integers(0, EXPERTS)
modes = st.sampled_from(["protect", "select"])
