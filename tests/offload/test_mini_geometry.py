"""On an accelerator in bfloat16: a model of LLaDA2.0-mini's layer geometry under budgets, against full residency.

    pytest --accelerator tests/offload/test_mini_geometry.py

Five layers of random weights; what one layer does right the others do too. The fixtures are checked on an accelerator
by the same tests as on a CPU (``pytest --accelerator tests``).
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax import Engine, ModelConfig, Threshold
from oled_jax.comparison import compare
from oled_jax.offload.bank import to_bank
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, STREAM, OffloadedExperts
from oled_jax.retention import policy_by_name

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from random_engine import random_weights

pytestmark = pytest.mark.gpu

RULE = Threshold(threshold=0.9, mask_id=0, eos_id=1)
PROMPT = np.random.default_rng(0).integers(2, 1000, 70).tolist()


@functools.cache
def weights():
    """Model and bank, made once."""
    config = ModelConfig.from_hf({**ModelConfig.from_preset("llada2.0-mini").to_hf(), "num_hidden_layers": 5})
    model, experts = random_weights(config, jnp.bfloat16)
    total = sum(array.nbytes for array in jax.tree.leaves(experts))
    bank = {
        layer: jax.tree.map(lambda array: to_bank(array, "a layer", 0, total), each) for layer, each in experts.items()
    }
    return model, experts, bank


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
