"""Published systems and ``commit-ahead``: pools and predictions against plain references and by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.lab import Stream, Trace, replay, rule_by_name
from oled_jax.lab.commit_ahead import TokenExperts, outcomes
from oled_jax.lab.moe_infinity import counts_by_row
from oled_jax.lab.rules import without_prefetching
from oled_jax.lab.trace import PADDING
from tests.lab.test_replay import capacities
from tests.lab.traces import EXPERTS, LAYERS, random_trace, traces


def pool_reference(stream, capacity, worth):
    """One pool of slots with plain dictionaries: misses by forward and layer. ``worth(visits, last)``: least goes."""
    slots, misses = capacity * stream.num_layers, np.zeros((len(stream), stream.num_layers), int)
    visits, last = {}, {}
    for index, counts in enumerate(stream.counts.astype(int)):
        for layer in range(stream.num_layers):
            demand = {(layer, int(e)): int(counts[layer, e]) for e in np.flatnonzero(counts[layer])}
            missing = [key for key in demand if key not in visits]
            misses[index, layer] = len(missing)
            last.update(dict.fromkeys(demand, index * stream.num_layers + layer))
            for key in demand:
                if key in visits:
                    visits[key] += 1
            # Most tokens first, then the smaller id; nobody in demand makes room.
            for key in sorted(missing, key=lambda key: (-demand[key], key)):
                if len(visits) == slots:
                    leaving = [other for other in visits if other not in demand]
                    if not leaving:
                        break
                    # Of equals the later layer goes first, and in it the larger id.
                    victim = min(leaving, key=lambda o: (worth(visits[o], last[o]), -o[0], -o[1]))
                    del visits[victim]
                visits[key] = 1
    return misses


@given(traces(), capacities)
def test_pools_equal_a_plain_reference(trace, capacity):
    stream = Stream(trace)
    for name, worth in (
        ("moe-infinity-lfu", lambda visits, last: (visits, last // LAYERS)),
        ("lru-global", lambda visits, last: last),
    ):
        found = replay(stream, rule_by_name(name), capacity)
        np.testing.assert_array_equal(found.traffic.loads, pool_reference(stream, capacity, worth))
        assert found.resident.sum() <= capacity * LAYERS and not found.traffic.speculative.any()
        assert without_prefetching(found.rule) == found.rule and found.rule.label == name


@settings(max_examples=30)
@given(
    traces(prefill=True),
    st.booleans(),
    capacities,
    st.sampled_from(
        [
            *("moe-infinity", "moe-infinity:library=1,max_prefetch=2", "moe-infinity-lfu", "lru-global"),
            *("finemoe", "finemoe:d=1,store=3", "finemoe:d=1,maps=block", "finemoe:d=1,target=extra"),
            *("commit-ahead:theta=0.1", "lfuda+commit-ahead:target=extra,tokens=hindsight"),
        ]
    ),
)
def test_sums_agree(trace, include_prefill, capacity, name):
    stream = Stream(trace, include_prefill=include_prefill)
    result = replay(stream, rule_by_name(name), capacity)
    traffic = result.traffic
    assert traffic.speculative.sum() == traffic.used.sum() + traffic.wasted.sum()
    np.testing.assert_array_equal(traffic.loads, np.count_nonzero(stream.counts, axis=-1) - traffic.hits)
    assert (traffic.used <= traffic.hits).all() and result.resident.sum() <= capacity * LAYERS
    again = replay(stream, rule_by_name(name), capacity)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(traffic, again.traffic, strict=True))


def routed(*forwards, block=None, tokens=None, status=None, experts=6, layers=2) -> Trace:
    """One sequence; a forward is a list of tokens, a token a list of experts, one for each layer."""
    ids = np.asarray(forwards, np.uint16).swapaxes(1, 2)[..., None]
    count, _, width, _ = ids.shape
    numbers = np.arange(count, dtype=np.int32)
    block = np.zeros(count, np.int32) if block is None else np.asarray(block, np.int32)
    return Trace(
        num_experts=experts,
        expert_ids=ids,
        weights=np.ones(ids.shape, np.float16),
        confidence=np.full((count, width), 0.5, np.float16),
        tokens=np.zeros((count, width), np.int32) if tokens is None else np.asarray(tokens, np.int32),
        status=np.zeros((count, width), np.uint8) if status is None else np.asarray(status, np.uint8),
        sequence=np.zeros(count, np.int32),
        block=block,
        step=numbers,
        phase=np.ones(count, np.uint8),
        forward=numbers,
    )


def test_moe_infinity_predicts_what_the_nearest_block_wanted():
    """Two blocks begin with expert 0 and with 1 in layer 0, and go on to 2 and to 3. A third begins like the first:
    in layer 1 it finds 2, which was fetched as soon as layer 0 had been seen."""
    trace = routed([[0, 2]], [[1, 3]], [[4, 5]], [[0, 2]], block=[0, 1, 2, 3])
    found = replay(Stream(trace), rule_by_name("moe-infinity"), 1)
    traffic = found.traffic
    assert traffic.hits.tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]
    assert traffic.speculative.tolist()[3] == [0, 1] and traffic.used.tolist()[3] == [0, 1]
    assert without_prefetching(rule_by_name("moe-infinity")).label == "moe-infinity-lfu"


@pytest.mark.parametrize("maps", ["token", "block"])
def test_finemoe_predicts_what_the_nearest_token_chose(maps):
    trace = routed([[0, 2]], [[1, 3]], [[4, 5]], [[0, 2]])
    found = replay(Stream(trace), rule_by_name(f"finemoe:d=1,maps={maps}"), 1)
    traffic = found.traffic
    assert traffic.hits.tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]
    assert traffic.used.tolist()[3] == [0, 1]
    # Two layers ahead there is nothing to predict.
    assert not replay(Stream(trace), rule_by_name("finemoe:d=2"), 1).traffic.speculative.any()


def test_commit_ahead_predicts_the_experts_of_new_words():
    """Token 7 wanted expert 2 (and 3 in layer 1) as a word. It is committed anew, after two forwards in which experts
    4 and 5 had the slots: its experts are back before the next forward."""
    forwards = [[[2, 3]], [[4, 5]], [[4, 5]], [[2, 3]]]
    given = {"tokens": [[7], [9], [7], [7]], "status": [[2], [0], [1], [2]]}
    found = replay(Stream(routed(*forwards, **given)), rule_by_name("commit-ahead"), 1)
    assert found.traffic.hits.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert found.traffic.speculative.tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
    # With another word, the experts of the average one: 2 and 3 again, as no other has been seen.
    given["tokens"][2] = [8]
    again = replay(Stream(routed(*forwards, **given)), rule_by_name("commit-ahead"), 1)
    np.testing.assert_array_equal(again.traffic.hits, found.traffic.hits)


def test_commit_ahead_looks_two_forwards_ahead_with_hindsight():
    """A masked position will be token 7. That it is committed next has the chance 1/2 to begin with, and its experts
    come while the next forward runs; in vain, and then the chance is 1/3. At last it is committed."""
    forwards = [[[2, 3]], [[4, 5]], [[4, 5]], [[4, 5]], [[2, 3]]]
    given = {"tokens": [[7], [9], [9], [7], [7]], "status": [[2], [0], [0], [1], [2]], "block": [0, 1, 1, 1, 1]}
    stream = Stream(routed(*forwards, **given))
    for theta, begun in ((0.3, [0, 0, 1, 1, 0]), (0.5, [0, 0, 1, 1, 0]), (0.6, [0, 0, 0, 1, 0])):
        found = replay(stream, rule_by_name(f"commit-ahead:tokens=hindsight,theta={theta}"), 1).traffic
        assert found.speculative[:, 0].tolist() == begun
        assert found.wasted[:, 0].sum() == sum(begun) - 1 and found.used[4, 0] == 1
        # No more is known when the forwards themselves proposed the token.
        proposed = dataclasses.replace(stream.trace, candidates=np.full_like(stream.trace.tokens, 7))
        again = replay(Stream(proposed), rule_by_name(f"commit-ahead:theta={theta}"), 1).traffic
        np.testing.assert_array_equal(again.speculative, found.speculative)
        # Nor do they help who does not ask, or another proposal, of a word that chose other experts.
        for trace, tokens in ((proposed, "committed"), (stream.trace, "candidates")):
            alone = replay(Stream(trace), rule_by_name(f"commit-ahead:tokens={tokens},theta={theta}"), 1).traffic
            assert alone.speculative[:, 0].tolist() == [0, 0, 0, 1, 0]
    # In staging both places are kept apart: nothing is evicted, and what is predicted again is not fetched again.
    found = replay(stream, rule_by_name("commit-ahead:tokens=hindsight,target=extra,theta=0.3"), 1).traffic
    assert found.speculative[:, 0].tolist() == [0, 0, 1, 0, 0] and found.hits[:, 0].tolist() == [0, 0, 1, 1, 1]


def test_what_positions_become():
    trace = routed([[0, 0]] * 1, [[0, 0]], [[0, 0]], tokens=[[5], [6], [7]], block=[0, 0, 1])
    assert outcomes(trace).tolist() == [[6], [6], [7]]


def test_a_table_of_words():
    trace = random_trace(3, 10)
    table, counted = TokenExperts(trace), trace.expert_ids[:, 0, :, 0] != PADDING
    tokens, ids = trace.tokens[counted], trace.expert_ids.swapaxes(1, 2)[counted]
    table.learn(tokens, ids)
    token = int(tokens[0])
    mine = ids[tokens == token]
    share = np.stack([np.stack([(mine == e).any(-1)]).mean(1)[0] for e in range(EXPERTS)], axis=-1)
    np.testing.assert_allclose(table.expected(np.array([token]), np.array([0.5])), 0.5 * share, rtol=1e-6)
    assert share.shape == (LAYERS, EXPERTS)


def test_counts_by_row():
    trace = dataclasses.replace(random_trace(4, 12))
    stream = Stream(trace)
    for forward in stream.forwards:
        np.testing.assert_array_equal(counts_by_row(stream, forward).sum(0), stream.counts[forward.index])


@pytest.mark.parametrize("name", ["moe-infinity", "finemoe:d=1", "commit-ahead"])
def test_what_was_studied_is_known_from_the_start(name):
    """Replayed after itself, a stream of two sequences tells the second what the first has shown."""
    first = routed([[0, 2]], [[1, 3]], tokens=[[7], [8]], status=[[2], [2]], block=[0, 1])
    second = routed([[4, 5]], [[0, 2]], tokens=[[7], [7]], status=[[1], [2]], block=[0, 1])
    rule = rule_by_name(name)
    cold, studied = (replay(Stream(second), rule, 1, study=study).traffic for study in (None, Stream(first)))
    assert not cold.hits.any() and not cold.used.any()
    assert studied.used.sum() >= 1 and studied.hits.sum() == studied.used.sum()


@given(traces(), st.integers(0, 2**31), st.sampled_from(["lru", "lru:tie=load,mode=select", "oled", "min-bypass"]))
def test_unequal_budgets_are_layers_of_their_own(trace, seed, name):
    """What a layer does with its slots does not depend on the others."""
    budget = np.random.default_rng(seed).integers(0, EXPERTS + 1, (LAYERS, 1)).astype(np.int32)
    stream, rule = Stream(trace), rule_by_name(name)
    found = replay(stream, rule, 3, budget=budget)
    assert found.decode.slots == tuple(budget[:, 0])
    for layer, slots in enumerate(budget[:, 0].tolist()):
        if slots:
            alone = replay(stream, rule, slots)
            np.testing.assert_array_equal(found.traffic.hits[:, layer], alone.traffic.hits[:, layer])
        else:
            assert not found.traffic.hits[:, layer].any()
