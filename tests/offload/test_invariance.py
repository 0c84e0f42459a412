"""Placement never changes results, for whole generations: random models, prompts, batches, starting caches, policies.

To vary policies without compiling, one policy here ranks by arrays that a manager makes up anew for every forward:
whatever a policy can answer is among them. Models vary by exchanging the weights that compiled programs are given.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax import Engine
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, STREAM, OffloadedExperts
from oled_jax.retention import Plan, RetentionPolicy
from tests.golden_fixtures import BFLOAT16, CONTEXT, GOLDEN, banked, cases, rule_of

NAME = "llada2-tiny-f32"


class Answers(NamedTuple):
    """``keep`` and ``admit`` int32, ``may_admit`` bool, ``[L, E]`` each."""

    keep: np.ndarray
    admit: np.ndarray
    may_admit: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeUp(RetentionPolicy):
    """Ranks by what its state says."""

    name: ClassVar[str] = "made-up"

    def init(self, num_layers, num_experts, capacity, xp, *, sequences=1) -> Answers:
        zeros = xp.zeros((num_layers, num_experts), xp.int32)
        order = zeros + xp.arange(num_experts, dtype=xp.int32)
        return Answers(order, order, zeros == 0)

    def plan(self, state, layer, demand, counts, gates, resident, xp) -> Plan:
        return Plan(state.keep[layer], state.admit[layer], state.may_admit[layer])

    def observe(self, state, record, xp) -> Answers:
        return state


class Whims:
    """A manager that answers at random."""

    def __init__(self, layers: int, experts: int):
        self.shape = (layers, experts)
        self.rng = np.random.default_rng(0)
        self.seconds = 0.0
        self.state = self.begin(1)

    def begin(self, sequences: int) -> Answers:
        return self.observe(None)

    def observe(self, record) -> Answers:
        keep, admit = (np.argsort(self.rng.random(self.shape), axis=1).astype(np.int32) for _ in range(2))
        self.state = Answers(keep, admit, self.rng.random(self.shape) < self.rng.choice([0.3, 0.9, 1.0]))
        return self.state


@functools.cache
def whimsical(name: str, capacity: int, form: str, staging: int) -> tuple[Engine, Whims]:
    """An engine whose retention is made up, and who makes it up."""
    model, experts = banked(name)
    config = model.config
    runner = OffloadedExperts(config.num_experts, capacity, MadeUp(), staging, form, observes=False)
    whims = Whims(len(config.moe_layers), config.num_experts)
    options = {"path": GOLDEN / name, "context_length": CONTEXT, "new_manager": lambda: whims}
    return Engine(model, experts, runner=runner, **options), whims


@functools.cache
def resident(name: str) -> Engine:
    """The same model, all experts on the device; its weights are exchanged with the others'."""
    model, experts = banked(name)
    experts = jax.tree.map(lambda array: jax.device_put(np.asarray(array)), experts)
    return Engine(model, experts, path=GOLDEN / name, context_length=CONTEXT)


def give_weights(engine: Engine, seed: int) -> None:
    """Another model for compiled programs: every matrix is scaled by its own random factors."""

    def scaled(array):
        rng = np.random.default_rng([seed, *array.shape])
        factors = rng.uniform(0.3, 1.7, array.shape[-1:]).astype(array.dtype)
        return jax.device_put(np.asarray(array) * factors, array.sharding)

    original = ORIGINALS.setdefault(id(engine), (engine.programs._leaves, engine.programs._store))
    engine.programs._leaves, engine.programs._store = jax.tree.map(scaled, original)
    _, engine.experts.state = engine.experts._runner.init(engine.programs._store)  # slots held the other model's


ORIGINALS: dict[int, tuple] = {}

prompts = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=60), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "form", "staging"),
    [(1, LOAD_THEN_COMPUTE, 1), (5, LOAD_THEN_COMPUTE, 2), (16, LOAD_THEN_COMPUTE, 4), (1, STREAM, 1), (6, STREAM, 3)],
)
@settings(max_examples=8)
@given(prompts, st.integers(0, 2**31), st.integers(1, 30), st.integers(0, 2**31))
def test_generations_are_those_of_full_residency(capacity, form, staging, prompts, model, gen_length, whim):
    kind, _, case = cases(NAME)[0]
    rule = dataclasses.replace(rule_of(kind, case), block_length=8, steps=8, threshold=0.4)
    prompts = (prompts * 3)[: 1 if len(prompts) == 1 else 3]  # two batch shapes are compiled, not three
    engine, whims = whimsical(NAME, capacity, form, staging)
    whims.rng = np.random.default_rng(whim)
    for each in (engine, resident(NAME)):
        give_weights(each, model)
    engine.generate_batch(prompts[::-1], rule, gen_length=8)  # what this leaves in the slots is where the next starts
    ours = engine.generate_batch(prompts, rule, gen_length=gen_length)
    theirs = resident(NAME).generate_batch(prompts, rule, gen_length=gen_length)
    assert [out.tokens for out in ours] == [out.tokens for out in theirs]
    assert [out.num_forwards for out in ours] == [out.num_forwards for out in theirs]


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(0, 2**31), st.integers(1, 30))
def test_load_then_compute_gives_the_same_bits_whatever_stays(prompt, whim, gen_length):
    """In bfloat16: two runs that start from other caches and are answered otherwise."""
    kind, _, case = cases(BFLOAT16)[0]
    rule = dataclasses.replace(rule_of(kind, case), block_length=8, steps=8)
    engine, whims = whimsical(BFLOAT16, 5, LOAD_THEN_COMPUTE, 2)
    runs = []
    for seed in (whim, whim + 1):
        whims.rng = np.random.default_rng(seed)
        events, records = [], []
        listeners = {"on_step": events.append, "on_record": records.append, "with_logits": True}
        engine.generate(prompt, rule, gen_length=gen_length, **listeners)
        runs.append((events, records))
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
    if len(runs[0][1]) > 2:
        pairs = zip(runs[0][1], runs[1][1], strict=True)
        assert any((one.resident != other.resident).any() for one, other in pairs), "nothing was varied"
