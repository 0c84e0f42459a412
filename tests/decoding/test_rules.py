"""The jitted rules against the plain-Python transcription of the specification, on scripted logits.

Logits are a fixed random function of the block's tokens, so that a trajectory can return to an earlier state; a small
vocabulary makes MASK, EOS, DELETE and SPLIT frequent candidates.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax import Editing, Levenshtein, OledError, Threshold
from oled_jax.decoding.rule import eos_ids, stops_when_clean
from oled_jax.decoding.sampling import Sampler, greedy, sample, top_positions
from tests.decoding import reference

LENGTH, VOCAB = 6, 9
MASK, EOS, DELETE, SPLIT = 8, 7, 6, 5
UNUSED_KEY = np.zeros(2, np.uint32)


def scripted(seed: int, sharpness: float):
    """``forward(tokens) -> logits``: random, but a function of the tokens; with few distinct values, so that editing
    runs in circles."""

    def forward(tokens):
        state = zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % (1 + seed % 4)
        return np.random.default_rng([seed, state]).standard_normal((LENGTH, VOCAB)).astype(np.float32) * sharpness

    return forward


@functools.cache
def compiled(program):
    return jax.jit(program.enter), jax.jit(lambda params, state, logits: program.advance(params, state, logits, None))


def decode(rule, forward, block, fixed, clean=True, gen_length=32):
    """One block through the program: tokens, forwards, and what the last forward saw."""
    enter, advance = compiled(rule.program())
    params = rule.params(gen_length, VOCAB)
    state = enter(params, np.asarray(block, np.int32), np.asarray(fixed), np.bool_(clean))
    forwards, seen = 0, list(block)
    while not state.done:
        seen = np.asarray(state.tokens).tolist()
        state = advance(params, state, forward(seen))
        forwards += 1
    return np.asarray(state.tokens).tolist(), forwards, seen


prompts = st.lists(st.integers(0, 4), max_size=LENGTH - 1)
units = st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.9, 1.0])
seeds = st.integers(0, 2**31)
sharpness = st.sampled_from([0.3, 1.5, 4.0])


@settings(max_examples=150)
@given(prompts, seeds, sharpness, units, st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(1, 20))
def test_threshold(prompt, seed, sharp, threshold, steps, minimal_topk, early, gen_length):
    gen_length = max(gen_length, minimal_topk)
    rule = Threshold(LENGTH, steps, threshold, minimal_topk, eos_early_stop=early, mask_id=MASK, eos_id=(EOS,))
    block = prompt + [MASK] * (LENGTH - len(prompt))
    fixed = [i < len(prompt) for i in range(LENGTH)]
    forward = scripted(seed, sharp)
    expected = reference.threshold(forward, block, 0, len(prompt), [], rule, gen_length)
    assert decode(rule, forward, block, fixed, gen_length=gen_length) == expected


def test_threshold_does_not_stop_early_behind_a_mask_of_an_earlier_block():
    rule = Threshold(LENGTH, 6, 1.0, eos_early_stop=True, mask_id=MASK, eos_id=EOS)

    def forward(tokens):
        logits = np.zeros((LENGTH, VOCAB), np.float32)
        logits[:, EOS] = 5.0 - np.arange(LENGTH)
        return logits

    block, fixed = [MASK] * LENGTH, [False] * LENGTH
    assert decode(rule, forward, block, fixed, clean=True)[1] == 1
    assert decode(rule, forward, block, fixed, clean=False)[1] == 6
    assert reference.threshold(forward, block, LENGTH, 0, [MASK], rule, 32)[1] == 6


@settings(max_examples=150)
@given(prompts, seeds, sharpness, units, st.none() | units, st.integers(0, 5), st.integers(1, 3))
def test_editing(prompt, seed, sharp, threshold, editing_threshold, max_post_steps, num_to_transfer):
    rule = Editing(LENGTH, threshold, editing_threshold, max_post_steps, num_to_transfer, mask_id=MASK, eos_id=EOS)
    block = prompt + [MASK] * (LENGTH - len(prompt))
    fixed = [i < len(prompt) for i in range(LENGTH)]
    forward = scripted(seed, sharp)
    assert decode(rule, forward, block, fixed) == reference.editing(forward, block, 0, len(prompt), rule)


@settings(max_examples=250)
@given(
    prompts, seeds, sharpness, units, st.none() | units, st.integers(0, 4), st.integers(1, 7), st.sampled_from([4, 24])
)
def test_levenshtein(prompt, seed, sharp, threshold, editing_threshold, max_post_steps, steps, max_steps):
    rule = Levenshtein(
        block_length=LENGTH,
        steps=steps,
        threshold=threshold,
        editing_threshold=editing_threshold,
        max_post_steps=max_post_steps,
        max_steps_per_block=max_steps,
        mask_id=MASK,
        eos_id=EOS,
        delete_token_id=DELETE,
        split_token_id=SPLIT,
    )
    block = prompt + [MASK] * (LENGTH - len(prompt))
    fixed = [i < len(prompt) for i in range(LENGTH)]
    forward = scripted(seed, sharp)
    assert decode(rule, forward, block, fixed) == reference.levenshtein(forward, block, rule)[:3]


def test_levenshtein_scripts_reach_the_anti_loop():
    """The comparison above is worth something only if loops occur in it."""
    rule = Levenshtein(
        LENGTH, 4, 0.2, 0.0, 4, 24, mask_id=MASK, eos_id=EOS, delete_token_id=DELETE, split_token_id=SPLIT
    )
    fired = [reference.levenshtein(scripted(seed, 1.5), [MASK] * LENGTH, rule)[3] for seed in range(200)]
    assert sum(map(bool, fired)) > 10
    for seed in np.flatnonzero(fired)[:10]:
        forward = scripted(int(seed), 1.5)
        expected = reference.levenshtein(forward, [MASK] * LENGTH, rule)[:3]
        assert decode(rule, forward, [MASK] * LENGTH, [False] * LENGTH) == expected


def structural(new, rule_edit=0.0):
    """Outcome of one forward on [0, 1, 2, 3, 4, 4] after masks are gone, with ``new`` as the best tokens."""
    rule = Levenshtein(
        LENGTH, 4, 0.0, rule_edit, 9, 24, mask_id=MASK, eos_id=EOS, delete_token_id=DELETE, split_token_id=SPLIT
    )
    enter, advance = compiled(rule.program())
    params = rule.params(32, VOCAB)
    logits = lambda tokens: np.eye(VOCAB, dtype=np.float32)[tokens] * 9  # noqa: E731
    state = enter(params, np.full(LENGTH, MASK, np.int32), np.zeros(LENGTH, bool), np.bool_(True))
    state = advance(params, state, logits([0, 1, 2, 3, 4, 4]))
    return np.asarray(advance(params, state, logits(new)).tokens).tolist()


def test_delete_closes_the_gap_and_split_opens_a_masked_slot():
    assert structural([0, DELETE, 2, 3, 4, 4]) == [0, 2, 3, 4, 4, MASK]
    assert structural([0, SPLIT, 2, 3, 4, 4]) == [0, MASK, 1, 2, 3, 4]
    assert structural([SPLIT] * 6) == [MASK, 0, MASK, 1, MASK, 2]
    assert structural([DELETE] * 6) == [MASK] * 6
    assert structural([DELETE, SPLIT, 2, 3, 4, 4]) == [MASK, 1, 2, 3, 4, 4]


def test_stopping():
    early = Editing(eos_early_stop=True, mask_id=MASK, eos_id=(EOS, 1))
    assert stops_when_clean(early, np.array([2, 1, 3]))
    assert not stops_when_clean(early, np.array([2, 3]))
    assert not stops_when_clean(early, np.array([2, EOS, MASK]))
    assert not Editing(mask_id=MASK, eos_id=EOS).stops(np.array([EOS]))
    assert Threshold(mask_id=MASK, eos_id=EOS).stops(np.array([MASK, EOS]))
    assert eos_ids(early) == (EOS, 1)


def test_published_defaults():
    """Spec 5.4."""
    t, e, v = Threshold(), Editing(), Levenshtein()
    assert (t.block_length, t.steps, t.threshold, t.minimal_topk, t.temperature) == (32, 32, 0.95, 1, 0.0)
    assert (e.block_length, e.threshold, e.editing_threshold, e.max_post_steps, e.num_to_transfer) == (
        32,
        0.95,
        0.9,
        16,
        1,
    )
    assert (v.steps, v.threshold, v.editing_threshold, v.max_post_steps, v.max_steps_per_block) == (
        32,
        0.5,
        0.0,
        16,
        1000,
    )
    assert not (t.eos_early_stop or e.eos_early_stop or v.eos_early_stop)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Threshold(block_length=0), "block_length"),
        (lambda: Threshold(steps=0), "steps"),
        (lambda: Threshold(threshold=1.5), "threshold"),
        (lambda: Threshold(threshold=-0.1), "threshold"),
        (lambda: Threshold(threshold=float("nan")), "threshold"),
        (lambda: Threshold(minimal_topk=0), "minimal_topk"),
        (lambda: Threshold(temperature=-1.0), "temperature"),
        (lambda: Threshold(temperature=float("inf")), "temperature"),
        (lambda: Threshold(top_k=0), "top_k"),
        (lambda: Threshold(top_p=0.0), "top_p"),
        (lambda: Threshold(top_p=1.1), "top_p"),
        (lambda: Threshold(mask_id=-1), "mask_id"),
        (lambda: Threshold(eos_id=()), "eos_id"),
        (lambda: Threshold(eos_id=("a",)), "eos_id"),
        (lambda: Editing(editing_threshold=2.0), "editing_threshold"),
        (lambda: Editing(max_post_steps=-1), "max_post_steps"),
        (lambda: Editing(num_to_transfer=0), "num_to_transfer"),
        (lambda: Levenshtein(steps=0), "steps"),
        (lambda: Levenshtein(max_steps_per_block=0), "max_steps_per_block"),
        (lambda: Threshold(minimal_topk=9, mask_id=MASK, eos_id=EOS).params(8, VOCAB), "minimal_topk"),
    ],
)
def test_values_out_of_range_are_named(make, name):
    with pytest.raises(OledError, match=rf"^{name} "):
        make()


def test_greedy_takes_the_lowest_id_on_ties_and_its_softmax_probability():
    logits = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    token, p = greedy(jnp.asarray(logits))
    assert int(token[0]) == 1
    np.testing.assert_allclose(p, np.exp(3) / np.exp(logits).sum(), rtol=1e-6)


def sampler(temperature=1.0, top_k=5, top_p=1.0):
    return Sampler(np.float32(temperature), np.int32(top_k), np.float32(top_p))


def test_sampling_filters_by_top_k_then_top_p_keeping_the_crossing_token():
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.07, 0.03]], jnp.float32)).repeat(4000, 0)
    key = jax.random.key(0)
    drawn, p = sample(logits, sampler(), key)
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 4000, [0.4, 0.3, 0.2, 0.07, 0.03], atol=0.03)
    np.testing.assert_allclose(p, np.array([0.4, 0.3, 0.2, 0.07, 0.03])[drawn], rtol=1e-5)
    drawn, p = sample(logits, sampler(top_k=2), key)
    assert set(np.asarray(drawn).tolist()) == {0, 1}
    np.testing.assert_allclose(p, np.array([4 / 7, 3 / 7])[drawn], rtol=1e-5)
    drawn, _ = sample(logits, sampler(top_p=0.65), key)
    assert set(np.asarray(drawn).tolist()) == {0, 1}
    drawn, _ = sample(logits, sampler(top_p=0.71), key)
    assert set(np.asarray(drawn).tolist()) == {0, 1, 2}
    drawn, _ = sample(logits, sampler(temperature=1e-3), key)
    assert set(np.asarray(drawn).tolist()) == {0}


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=5, max_size=5), st.integers(0, 31), st.integers(0, 6))
def test_top_positions(confidence, bits, count):
    among = np.array([bits >> i & 1 for i in range(5)], bool)
    mask = top_positions(jnp.asarray(confidence), jnp.asarray(among), count)
    expected = reference.top(confidence, np.flatnonzero(among).tolist(), count)
    assert set(np.flatnonzero(mask).tolist()) == expected
