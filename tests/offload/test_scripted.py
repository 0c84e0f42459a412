"""Scripted routing: the step serves the script, counts it, and reports it."""

import numpy as np

from oled_jax import Engine
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, OffloadedExperts
from oled_jax.offload.scripted import ScriptedRouting
from oled_jax.retention import policy_by_name
from tests.golden_fixtures import CONTEXT, GOLDEN, banked, cases, rule_of

NAME = "llada2-tiny-f32"


def test_denoising_serves_the_script_and_prefill_does_not():
    model, experts = banked(NAME)
    config = model.config
    kind, _, case = cases(NAME)[0]
    rule = rule_of(kind, case)
    rng = np.random.default_rng(0)
    shape = (5, len(config.moe_layers), rule.block_length, config.num_experts_per_tok)
    script = rng.permuted(np.broadcast_to(np.arange(config.num_experts), (*shape[:-1], config.num_experts)), axis=-1)
    script = script[..., : shape[-1]].astype(np.int32)
    inner = OffloadedExperts(config.num_experts, 5, policy_by_name("oled"), 2, LOAD_THEN_COMPUTE)
    engine = Engine(model, experts, path=GOLDEN / NAME, context_length=CONTEXT, runner=ScriptedRouting(inner, script))
    records = []
    out = engine.generate(list(range(1, 12)), rule, gen_length=16, on_record=records.append)
    prefills = [record for record in records if not record.phase.any()]
    assert 0 < len(prefills) < len(records)
    for record in records:
        expected = script[int(record.forward) % 5]
        same = np.array_equal(record.routing.ids, expected)
        assert same == bool(record.phase.any())
        counts = np.stack([np.bincount(ids[ids >= 0], minlength=config.num_experts) for ids in record.routing.ids])
        np.testing.assert_array_equal(record.counts, counts)
    metrics = out.metrics.experts
    assert (metrics.experts_on_device, metrics.policy, metrics.form) == (5, "oled", LOAD_THEN_COMPUTE)
    assert sum(metrics.decode.misses) > 0
