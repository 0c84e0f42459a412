"""On an accelerator in bfloat16: a model of LLaDA2.0-mini's layer geometry under budgets, against full residency.

    pytest --accelerator tests/offload/test_mini_geometry.py

Five layers of random weights; what one layer does right the others do too. The fixtures are checked on an accelerator
by the same tests as on a CPU (``pytest --accelerator tests``).
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from random_engine import banked, geometry, random_weights

from oled_jax import Engine, Threshold
from oled_jax.comparison import compare
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, STREAM, OffloadedExperts
from oled_jax.retention import policy_by_name

pytestmark = pytest.mark.gpu

RULE = Threshold(threshold=0.9, mask_id=0, eos_id=1)
PROMPT = np.random.default_rng(0).integers(2, 1000, 70).tolist()


@functools.cache
def weights():
    """Model and bank, made once."""
    model, experts = random_weights(geometry("llada2.0-mini", layers=5), jnp.bfloat16)
    return model, experts, banked(experts)


@functools.cache
def resident() -> Engine:
    model, experts, _ = weights()
    return Engine(model, experts, context_length=256)


def offloaded(capacity: int, policy: str, form: str) -> Engine:
    model, _, bank = weights()
    runner = OffloadedExperts(model.config.num_experts, capacity, policy_by_name(policy), form=form)
    return Engine(model, bank, context_length=256, runner=runner)


def logits_of(engine: Engine) -> list[np.ndarray]:
    events = []
    engine.generate(PROMPT, RULE, gen_length=64, on_step=events.append, with_logits=True)
    return [event.logits for event in events]


@pytest.mark.parametrize("capacity", [40, 100])
def test_equal_to_the_bit_at_equal_capacity(capacity):
    """Whatever the policy keeps, and whatever was in the slots before."""
    engine = offloaded(capacity, "lru", LOAD_THEN_COMPUTE)
    cold, warm = logits_of(engine), logits_of(engine)
    others = [logits_of(offloaded(capacity, policy, LOAD_THEN_COMPUTE)) for policy in ("random:seed=3", "ondemand")]
    for run in (warm, *others):
        for one, other in zip(cold, run, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", [LOAD_THEN_COMPUTE, STREAM])
@pytest.mark.parametrize("capacity", [8, 100, 256])
def test_within_the_golden_tolerance_of_full_residency(capacity, form):
    engine = offloaded(capacity, "lru", form)
    comparison, _ = compare(engine, resident(), PROMPT, RULE, gen_length=64)
    assert comparison.problems(np.dtype(jnp.bfloat16)) == []
    for kind in ("prefill", "denoise"):
        assert engine.programs.memory(kind).host_temp_size_in_bytes == 0, "something is computed on the host"
