"""Budgets as users ask for them: the engine loads what was asked for, and says in one line what cannot be."""

import jax
import make_checkpoint
import pytest

from oled_jax import Engine, Threshold
from oled_jax.config import ModelConfig
from oled_jax.errors import OledError
from oled_jax.offload import bank, budget
from oled_jax.planner import PlanError, make_plan
from oled_jax.retention import policy_names
from tests.golden_fixtures import CONTEXT, GOLDEN, cases, rule_of

PATH = GOLDEN / "llada2-tiny-f32"


@pytest.mark.parametrize(
    ("asked", "slots"), [("40%", 6), (3, 3), ("3", 3), ("100%", 16), ("1%", 1), (None, None), ("all", None)]
)
def test_what_was_asked_for_is_loaded(asked, slots):
    engine = Engine.load(PATH, context_length=CONTEXT, experts_on_device=asked, policy="lfu", staging=2)
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(engine.experts.store)}
    metrics = engine.experts.metrics()
    assert metrics.experts_on_device == (slots or 16)
    if slots is None:
        assert kinds == {"device"}
        assert metrics.policy is None
    else:
        assert kinds == {"pinned_host"}
        assert metrics.policy == "lfu"
        rows = {
            array.shape[0] for layer in engine.experts.state.layers.values() for array in jax.tree.leaves(layer.slots)
        }
        assert rows == {slots + 2}


@pytest.mark.slow
@pytest.mark.parametrize("manager", ["device", "host"])
def test_golden_tokens_of_a_loaded_engine(manager):
    """At 40 %, with the paper's policy, in both ways of deciding."""
    engine = Engine.load(
        PATH, context_length=CONTEXT, experts_on_device="40%", policy="oled", form="stream", manager=manager
    )
    kind, _, case = cases("llada2-tiny-f32")[0]
    out = engine.generate(case["prompt_ids"], rule_of(kind, case), gen_length=case["gen_length"])
    assert out.tokens == case["output_ids"]
    assert out.metrics.experts.policy == "oled:mode=select"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"experts_on_device": 0}, "from 1 to 16"),
        ({"experts_on_device": -3}, "-3"),
        ({"experts_on_device": 17}, "17"),
        ({"experts_on_device": "0%"}, "'0%'"),
        ({"experts_on_device": "140%"}, "'140%'"),
        ({"experts_on_device": "some"}, "'some'"),
        ({"experts_on_device": 2.5}, "2.5"),
        ({"experts_on_device": True}, "True"),
        ({"experts_on_device": "auto"}, 'give a number of experts or a share such as "40%"'),
        ({"experts_on_device": 4, "policy": "mru"}, ", ".join(policy_names())),
        ({"experts_on_device": 4, "policy": "lru:tie=coin"}, "tie is 'coin'"),
        ({"experts_on_device": 4, "policy": "static-frequency"}, "counts"),
        ({"experts_on_device": 4, "form": "magic"}, "load-then-compute or stream"),
        ({"experts_on_device": 4, "manager": "cloud"}, "device or host"),
        ({"experts_on_device": 4, "staging": 0}, "staging (--staging) is 0: give an integer from 1 to 16"),
        ({"staging": 17}, "staging (--staging) is 17: give an integer from 1 to 16"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(arguments, words, monkeypatch):
    monkeypatch.setattr("oled_jax.engine.load_weights", None)
    monkeypatch.setattr(budget, "device_memory", lambda: None)  # as on a CPU: "auto" has nothing to go by
    with pytest.raises(OledError) as caught:
        Engine.load(PATH, context_length=CONTEXT, **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("experts_on_device", [None, 1])
def test_a_model_of_two_experts(experts_on_device, tmp_path):
    sizes = "--layers 2 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --intermediate 16 --moe-intermediate 8 "
    sizes += "--experts 2 --experts-per-token 1 --groups 1 --topk-groups 1 --vocab 300 --max-position 64"
    assert make_checkpoint.main([str(tmp_path / "model"), *sizes.split()]) == 0
    engine = Engine.load(tmp_path / "model", experts_on_device=experts_on_device)
    out = engine.generate([1, 2, 3], Threshold(block_length=8, steps=2), gen_length=5)
    assert out.metrics.experts.experts_on_device == (experts_on_device or 2)
    assert len(out.tokens) > 0
    with pytest.raises(OledError, match=r"staging \(--staging\) is 3: give an integer from 1 to 2"):
        Engine.load(tmp_path / "model", experts_on_device=experts_on_device, staging=3)


def test_auto_that_cannot_fit_names_what_it_needs(monkeypatch):
    monkeypatch.setattr(budget, "device_memory", lambda: 2**20)
    with pytest.raises(PlanError, match="even 1 expert per layer"):
        Engine.load(PATH, context_length=CONTEXT, experts_on_device="auto")


def test_auto_takes_what_fits(monkeypatch):
    config = ModelConfig.from_hf(PATH)
    enough = make_plan(config, dtype="float32", context_length=CONTEXT, experts_on_device=16).device.total
    monkeypatch.setattr(budget, "device_memory", lambda: 2 * enough + 2**31)
    engine = Engine.load(PATH, context_length=CONTEXT, experts_on_device="auto")
    assert engine.experts.metrics().experts_on_device == 16


def test_a_pool_that_is_too_small_for_the_bank_is_told_with_the_variable():
    plan = make_plan(
        ModelConfig.from_preset("llada2.0-flash"), dtype="bfloat16", context_length=4096, experts_on_device=8
    )
    with pytest.raises(OledError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=2"):
        budget.check_pinned_pool(plan, None)
    budget.check_pinned_pool(plan, "400")
    mini = make_plan(
        ModelConfig.from_preset("llada2.0-mini"), dtype="bfloat16", context_length=4096, experts_on_device=8
    )
    budget.check_pinned_pool(mini, None)


def test_pinned_memory_that_runs_out_half_way_names_the_layer_and_leaves_nothing(monkeypatch):
    real, calls = jax.device_put, []

    def scarce(array, sharding=None, **options):
        if getattr(sharding, "memory_kind", None) == "pinned_host":
            calls.append(array)
            if len(calls) == 4:
                calls.clear()
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory while trying to allocate")
        return real(array, sharding, **options)

    monkeypatch.setattr(bank.jax, "device_put", scarce)
    before = len(jax.live_arrays())
    with pytest.raises(OledError, match=r"layers\.2\.mlp\.experts\..*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        Engine.load(PATH, context_length=CONTEXT, experts_on_device=4)
    assert len(jax.live_arrays()) == before


def test_other_errors_of_the_device_are_not_explained_away(monkeypatch):
    def broken(array, sharding=None, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: the link is down")

    monkeypatch.setattr(bank.jax, "device_put", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the link is down"):
        Engine.load(PATH, context_length=CONTEXT, experts_on_device=4)
