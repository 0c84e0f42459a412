"""The side-by-side comparison: equal engines, and one whose experts were spoilt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax import Engine
from oled_jax.comparison import Comparison, compare
from oled_jax.model.experts import ExpertWeights
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE
from oled_jax.retention import policy_by_name
from tests.golden_fixtures import CONTEXT, GOLDEN, banked, cases, engine, offloaded_engine, rule_of

NAME = "llada2-tiny-f32"
KIND, _, CASE = cases(NAME)[0]
LRU = policy_by_name("lru")


def compared(ours: Engine, reference: Engine) -> Comparison:
    return compare(ours, reference, CASE["prompt_ids"], rule_of(KIND, CASE), gen_length=CASE["gen_length"])[0]


@pytest.fixture(scope="module")
def offloaded() -> Engine:
    return offloaded_engine(NAME, 4, LRU, LOAD_THEN_COMPUTE)


def test_engines_that_agree(offloaded):
    outcome = compared(offloaded, engine(NAME))
    assert outcome.first_difference is None
    assert outcome.tokens == len(CASE["output_ids"])
    assert outcome.steps == outcome.steps_compared > 0
    assert outcome.argmax_equal == 1
    assert outcome.problems(np.dtype(np.float32)) == []


def test_an_engine_against_itself_is_equal_to_the_bit(offloaded):
    outcome = compared(offloaded, offloaded)
    assert (outcome.max_logit, outcome.mean_logit, outcome.differing_step) == (0, 0, None)


def test_spoilt_experts_are_noticed(offloaded):
    model, experts = banked(NAME)
    experts = jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), experts)  # out of the bank
    layer = max(experts)
    spoilt = {**experts, layer: ExpertWeights(experts[layer].gate_up, experts[layer].down * 1.5)}
    outcome = compared(Engine(model, spoilt, path=GOLDEN / NAME, context_length=CONTEXT), engine(NAME))
    assert outcome.differing_step == 0
    assert outcome.max_logit > 5e-4
    assert outcome.problems(np.dtype(np.float32))


GOOD = Comparison(10, None, 5, 5, 1e-5, 1e-6, 1.0, 0)


@pytest.mark.parametrize(
    ("change", "dtype", "said"),
    [
        ({}, "float32", ()),
        ({"first_difference": 3}, "float32", ("token 3 differs",)),
        ({"max_logit": 1e-3}, "float32", ("by up to 0.001",)),
        ({"max_logit": float("nan")}, "float32", ("nan",)),
        ({"first_difference": 3, "max_logit": 1.0, "mean_logit": 0.1, "argmax_equal": 0.97}, "float16", ()),
        ({"mean_logit": 0.2, "argmax_equal": 0.9}, "float16", ("0.2 on average", "90.0%")),
    ],
)
def test_problems_by_dtype(change, dtype, said):
    problems = dataclasses.replace(GOOD, **change).problems(np.dtype(dtype))
    assert len(problems) == len(said)
    assert all(words in problem for words, problem in zip(said, problems, strict=True))
