"""Scripted routing: the step serves the script, counts it, and reports it."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax import Engine, ModelConfig
from oled_jax.errors import OledError
from oled_jax.lab.trace import PADDING
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, OffloadedExperts
from oled_jax.offload.scripted import ScriptedRouting
from oled_jax.retention import Routing, policy_by_name
from tests.golden_fixtures import CONTEXT, GOLDEN, banked, cases, rule_of
from tests.lab.traces import random_trace

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
    assert metrics.routing == metrics.to_json()["routing"] == "scripted" and "routing scripted" in repr(engine)
    with pytest.raises(
        OledError, match=r"block_length is 4, and the trace .* has blocks of 8: give that \(--block-length 8"
    ):
        engine.generate([1, 2, 3], dataclasses.replace(rule, block_length=4), gen_length=8)


class Seen:
    """A runner that gives back the routing that it is told to serve."""

    def run(self, store, state, layer, x, routing, scale):
        return routing, state, None


def served(scripted, forward: int, layer: int, sequences: int) -> Routing:
    """What ``scripted`` has its runner serve, with the last token not counted."""
    length, chosen = scripted.script.shape[2:]
    ids = np.zeros((sequences * length, chosen), np.int32)
    ids[-1] = -1
    own = Routing(jnp.asarray(ids), jnp.full(ids.shape, 0.5), None, None, None, None)
    arrays = {"script": jnp.asarray(scripted.script), "weights": jnp.asarray(scripted.weights)}
    store = {"experts": {1: None, 4: None}, **arrays}
    return scripted.run(store, SimpleNamespace(forward=jnp.int32(forward)), layer, None, own, 1.0)[0]


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("weights", [np.float16, np.uint8])
def test_rows_of_a_trace_are_served_in_turn(weights, sequences):
    config = SimpleNamespace(moe_layers=(1, 4), num_experts=8, num_experts_per_tok=2)
    trace = random_trace(5, 12, prefill=True)
    whole = np.where(trace.expert_ids == PADDING, 3, trace.expert_ids)
    in_bytes = np.rint(trace.weights.astype(float) * 255).astype(np.uint8)
    trace = dataclasses.replace(trace, expert_ids=whole, weights=in_bytes if weights is np.uint8 else trace.weights)
    scripted = ScriptedRouting.of_trace(Seen(), trace, config)
    decoding = [row for row in range(len(trace.phase)) if trace.phase[row] > 0]
    assert scripted.block_length == 3 and len(scripted.script) == len(decoding)
    for forward in (0, 3, len(decoding) + 1):
        for position, layer in enumerate(config.moe_layers):
            found = served(scripted, forward, layer, sequences)
            rows = [decoding[(forward * sequences + s) % len(decoding)] for s in range(sequences)]
            ids = np.concatenate([trace.expert_ids[row, position] for row in rows]).astype(np.int32)
            ids[-1] = -1
            np.testing.assert_array_equal(found.ids, ids)
            given = np.concatenate([trace.weights[row, position] for row in rows]).astype(np.float32)
            np.testing.assert_allclose(found.weights, given / 255 if weights is np.uint8 else given, rtol=1e-6)


def test_traces_that_cannot_give_the_routing():
    tiny = ModelConfig.from_hf(GOLDEN / NAME)
    with pytest.raises(OledError) as caught:
        ScriptedRouting.of_trace(Seen(), random_trace(0, 4), tiny)
    assert str(caught.value) == (
        "trace cannot give the routing, it has: 4 problems: 2 MoE layers, and the model has 3; 8 experts per layer, "
        "and the model has 16; 2 experts per token, and the model has 4; tokens without experts in a decoding forward"
    )
    fitting = SimpleNamespace(moe_layers=(1, 4), num_experts=8, num_experts_per_tok=2)
    trace = random_trace(0, 4)
    with pytest.raises(OledError, match="1 problem: no decoding forwards, only prefill"):
        ScriptedRouting.of_trace(Seen(), dataclasses.replace(trace, phase=np.zeros_like(trace.phase)), fitting)
