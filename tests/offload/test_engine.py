"""Generation under a budget: golden tokens, and counters that an independent replay of the records confirms."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from oled_jax.comparison import compare
from oled_jax.offload.offloaded import FORMS, LOAD_THEN_COMPUTE, MODES, STREAM
from oled_jax.retention import Routing, Table, policy_by_name
from oled_jax.retention.frequency import StaticFrequency
from oled_jax.retention.priority import Oled, Status
from oled_jax.retention.record import MASKED, PROMPT
from tests.golden_fixtures import cases, engine, forward, offloaded_engine, rule_of

NAME = "llada2-tiny-f32"
EXPERTS, LAYERS, CAPACITY = 16, 3, 6
_RNG = np.random.default_rng(0)
LRU = policy_by_name("lru")
POLICIES = [
    LRU,
    policy_by_name("ondemand"),
    policy_by_name("fifo"),
    policy_by_name("random:seed=7"),
    policy_by_name("lfu:weight=token"),
    policy_by_name("lfuda:tie=load"),
    StaticFrequency(counts=Table(_RNG.integers(0, 9, (LAYERS, EXPERTS)))),
    policy_by_name("oled"),
    policy_by_name("oled:w=one,rho_in=0.9"),
    Oled(w="calibrated", aggregation="noisy-or", rho_in=0.3, table=Table(_RNG.random((3, 10)))),
    policy_by_name("status"),
    Status(successors=Table(_RNG.integers(-1, EXPERTS, (LAYERS, 320, 3)))),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "form"), [(1, FORMS[0]), (4, FORMS[0]), (6, FORMS[0]), (16, FORMS[0]), (1, STREAM)]
)
def test_golden_tokens_under_a_budget(capacity, form):
    eng = offloaded_engine(NAME, capacity, LRU, form)
    for kind, index, case in cases(NAME)[:4]:
        out = eng.generate(case["prompt_ids"], rule_of(kind, case), gen_length=case["gen_length"])
        assert out.tokens == case["output_ids"], index
    ids = forward(NAME)["input_ids"]
    np.testing.assert_allclose(eng.logits(ids, 8), engine(NAME).logits(ids, 8), atol=1e-4)


def test_a_policy_that_seldom_admits_may_have_a_row_for_every_expert():
    """Nothing that it leaves out is resident, then, and still there are more of those than staging rows."""
    kind, _, case = cases(NAME)[0]
    eng = offloaded_engine(NAME, EXPERTS, policy_by_name("tide:start=empty,tau=50"), FORMS[0], staging=1)
    outcome, out = compare(
        eng, engine(NAME), case["prompt_ids"], rule_of(kind, case), gen_length=case["gen_length"], seed=0
    )
    assert out.tokens == case["output_ids"]
    assert outcome.max_logit < 1e-3
    assert sum(out.metrics.experts.decode.rounds) > LAYERS * out.metrics.num_forwards


def prompts() -> list[list[int]]:
    return [case["prompt_ids"] for _, _, case in cases(NAME)[:2]]


def generated(eng, **listeners):
    """Two sequences of different lengths, decoded together."""
    rule = dataclasses.replace(rule_of(*cases(NAME)[0][::2]), block_length=8, steps=8, threshold=0.9)
    return eng.generate_batch(prompts(), rule, gen_length=24, **listeners)


def known_before(record, previous) -> Routing:
    """The forward's routing with what was known of its tokens before it: from the forward before, or a new block."""
    routing, rows = record.routing, len(record.sequence)
    shape = (rows, -1)
    fresh = np.where(routing.status == PROMPT, PROMPT, MASKED).reshape(shape)
    if previous is None or len(previous.routing.status) != len(routing.status):
        return routing._replace(confidence=np.full(len(routing.status), -1.0), status=fresh.reshape(-1))
    same = (record.sequence == previous.sequence) & (record.block == previous.block) & (previous.phase > 0)
    confidence = np.where(same[:, None], previous.routing.confidence.reshape(shape), -1.0)
    status = np.where(same[:, None], previous.routing.status.reshape(shape), fresh)
    return routing._replace(confidence=confidence.reshape(-1), status=status.reshape(-1))


def moved(policy, prefill: bool, plan, counts, wanted: set, resident: set, capacity: int) -> tuple[set, set]:
    """(admitted, evicted) of one layer by the words of the specification."""
    missing = wanted - resident
    if not policy.admits:
        return set(), set()
    if prefill or policy.mode == "select":
        rank = (lambda e: (counts[e], -e)) if prefill else (lambda e: plan.keep_rank[e])
        kept = set(sorted(resident | missing, key=rank, reverse=True)[:capacity])
        return kept & missing, resident - kept
    free = capacity - len(resident)
    victims = sorted(resident - wanted, key=lambda e: plan.keep_rank[e])
    if policy.contested:
        kept = (wanted & resident) | set(
            sorted(missing | set(victims), key=lambda e: -plan.keep_rank[e])[: capacity - len(wanted & resident)]
        )
        return kept & missing, resident - kept
    admitted = sorted(missing, key=lambda e: -plan.admit_rank[e])[: free + len(victims)]
    return set(admitted), set(victims[: max(0, len(admitted) - free)])


def replayed(policy, records, capacity: int):
    """Residency of every forward by sets in plain Python, and the policy's own ranks, in numpy.

    Yields, per record, (resident before, admitted, evicted) of each layer.
    """
    state = policy.for_batch(policy.init(LAYERS, EXPERTS, capacity, np), len(records[0].sequence), np)
    residents = [set(np.flatnonzero(row).tolist()) for row in policy.initial_residents(LAYERS, EXPERTS, capacity)]
    for record, previous in zip(records, [None, *records], strict=False):
        known, prefill, layers = known_before(record, previous), not np.any(record.phase > 0), []
        for layer in range(LAYERS):
            counts, resident = record.counts[layer], residents[layer]
            held = np.isin(np.arange(EXPERTS), list(resident))
            routing = known._replace(ids=known.ids[layer], weights=known.weights[layer])
            gates = policy.gates(state, routing, EXPERTS, np)
            plan = policy.plan(state, layer, counts > 0, counts, gates, held, np)
            wanted = set(np.flatnonzero(counts).tolist())
            admitted, evicted = moved(policy, prefill, plan, counts, wanted, resident, capacity)
            layers.append((resident, admitted, evicted))
            residents[layer] = (resident - evicted) | admitted
        yield layers
        state = policy.observe(state, record, np)


def check_replay(policy, records, capacity: int, metrics) -> None:
    """Every forward's residency, and the sums that the engine reports."""
    sums = {"prefill": [0, 0, 0, 0, 0], "decode": [0, 0, 0, 0, 0]}
    for index, (record, layers) in enumerate(zip(records, replayed(policy, records, capacity), strict=True)):
        assert int(record.forward) == index
        total = sums["decode" if np.any(record.phase > 0) else "prefill"]
        total[0] += 1
        for layer, (resident, admitted, evicted) in enumerate(layers):
            where = f"forward {index}, layer {layer}"
            assert set(np.flatnonzero(record.resident[layer])) == resident, where
            assert set(np.flatnonzero(record.admitted[layer])) == admitted, where
            assert set(np.flatnonzero(record.evicted[layer])) == evicted, where
            chosen = record.routing.ids[layer]
            experts, tokens = np.unique(chosen[chosen >= 0], return_counts=True)
            hit = np.isin(experts, list(resident))
            total[1] += len(experts)
            total[2] += int(hit.sum())
            total[3] += int(tokens.sum())
            total[4] += int(tokens[hit].sum())
    for phase, (forwards, wanted, hits, tokens, token_hits) in sums.items():
        traffic = getattr(metrics, phase)
        assert traffic.forwards == forwards
        assert (sum(traffic.requests), sum(traffic.hits)) == (wanted, hits)
        assert (sum(traffic.token_requests), sum(traffic.token_hits)) == (tokens, token_hits)
        assert sum(traffic.loads) == sum(traffic.misses) == wanted - hits
    assert metrics.bytes_moved == sum(metrics.decode.loads) * metrics.expert_bytes


# Every policy once, in either form by turns; the two that the papers are about in both.
COMBINATIONS = [(policy, FORMS[index % 2]) for index, policy in enumerate(POLICIES)]
COMBINATIONS += [(LRU, STREAM), (POLICIES[8], STREAM), (POLICIES[10], STREAM)]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), COMBINATIONS, ids=lambda value: getattr(value, "label", value))
def test_counters_equal_an_independent_replay(policy, form):
    eng = offloaded_engine(NAME, CAPACITY, policy, form)
    records = []
    outs = generated(eng, on_record=records.append)
    assert [out.tokens for out in outs] == [out.tokens for out in generated(engine(NAME))]
    policy = dataclasses.replace(policy, mode=MODES[form])
    check_replay(policy, records, CAPACITY, outs[0].metrics.experts)
    json.dumps(outs[0].metrics.to_json())


@pytest.mark.parametrize("policy", [LRU, POLICIES[8]], ids=lambda p: p.name)
def test_the_manager_on_the_host_decides_as_the_device_does(policy):
    streams = []
    for host in (False, True):
        records = []
        outs = generated(offloaded_engine(NAME, CAPACITY, policy, STREAM, host=host), on_record=records.append)
        metrics = outs[0].metrics.experts
        assert (metrics.manager_seconds > 0) == host
        streams.append(records)
    assert len(streams[0]) == len(streams[1])
    for ours, theirs in zip(*streams, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_an_interrupt_leaves_the_engine_usable():
    eng = offloaded_engine(NAME, CAPACITY, LRU, LOAD_THEN_COMPUTE)
    expected = [out.tokens for out in generated(eng)]

    def interrupt(event):
        raise KeyboardInterrupt

    for listener in ("on_block", "on_step", "on_record"):
        with pytest.raises(KeyboardInterrupt):
            generated(eng, **{listener: interrupt})
        assert [out.tokens for out in generated(eng)] == expected


def test_state_lost_between_two_programs_is_made_anew():
    """An interrupt can strike after a program took the state and before what it gives back is stored."""
    eng = offloaded_engine(NAME, CAPACITY, policy_by_name("oled"), STREAM, host=True)
    expected = [out.tokens for out in generated(eng)]
    for leaf in jax.tree.leaves(eng.experts.state):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    records = []
    outs = generated(eng, on_record=records.append)
    assert [out.tokens for out in outs] == expected
    assert not records[0].resident.any()
    assert int(records[0].forward) == 0
