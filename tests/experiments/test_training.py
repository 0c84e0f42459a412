"""Training: the forward is the engine's, the mask is the stated one, runs resume exactly, balancing balances."""

import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import expert_products
import jax
import jax.numpy as jnp
import main
import numpy as np
import objective
import pytest
import saving
from export import export
from flax import nnx
from forward import Rows, embed, forward, head, visible_clean
from loop import run_steps
from presets import BLOCK, DEMO, PRESETS, ROUTING, TINY
from profiling import scope_of, tables
from routing import balanced, load_report, route, slots_per_expert
from training import abstract_state, count, initial_state, jitted_step, weight_shapes

from oled_jax.checkpoint import layout
from oled_jax.config import ModelConfig
from oled_jax.engine import Engine
from oled_jax.errors import OledError
from oled_jax.model.experts import ExpertWeights
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.router import Router
from oled_jax.model.transformer import Experts, LLaDA2
from oled_jax.offload.resident import ResidentExperts

IDS = {"pad_token_id": 0, "eos_token_id": 0, "mask_token_id": 1}
SMALL = dataclasses.replace(
    TINY,
    config=dataclasses.replace(TINY.config, vocab_size=64, hidden_size=32, num_hidden_layers=2, **IDS),
    recipe=dataclasses.replace(TINY.recipe, batch=2, steps=60, warm_up=5),
)
KINDS = ("text", "copy", "sort")


class Batch(NamedTuple):
    """What ``batches`` makes, here at random."""

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    answer: np.ndarray
    kind: np.ndarray


def random_batch(seed: int, rows: int = 2, blocks: int = 3) -> Batch:
    """Two segments a row, then a block of padding in the last row; answers begin anywhere."""
    rng = np.random.default_rng(seed)
    shape = (rows, blocks * BLOCK)
    cut = BLOCK * (1 + (np.arange(rows) % (blocks - 1)))[:, None]
    column = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    segment = np.where(column < cut, 1, 2).astype(np.int32)
    segment[-1, -BLOCK:] = 0
    position = np.where(column < cut, column, column - cut).astype(np.int32)
    position[-1, -BLOCK:] = np.arange(BLOCK)
    answer = (position >= 7) & (segment > 0)
    kind = np.where(segment == 2, 1, 0).astype(np.int32)
    return Batch(rng.integers(2, 64, shape).astype(np.int32), segment, position, answer, kind)


first_state = functools.partial(initial_state, SMALL)


@functools.cache
def odd_state():
    """A state whose biases are not zero, so that they take part."""
    state = first_state(0)
    return dataclasses.replace(state, bias=0.05 * jax.random.normal(jax.random.key(1), state.bias.shape))


@functools.cache
def jitted_forward():
    return jax.jit(functools.partial(forward, SMALL.config, SMALL.recipe))


@functools.cache
def compiled_step():
    sums = objective.no_sums(SMALL.config, len(KINDS))
    return jitted_step(SMALL, len(KINDS)).lower(first_state(0), sums, random_batch(0), np.uint32(0)).compile()


def engine_parts(config: ModelConfig, weights, bias) -> tuple[LLaDA2, dict[int, ExpertWeights]]:
    """The engine's modules over the training arrays."""
    arrays = dict(weights)
    experts = {
        layer: ExpertWeights(arrays.pop(layout.gate_up_key(layer)), arrays.pop(layout.down_key(layer)))
        for layer in config.moe_layers
    }
    for layer, row in zip(config.moe_layers, bias, strict=True):
        arrays[f"layers.{layer}.mlp.gate.expert_bias"] = row
    graphdef, state = nnx.split(LLaDA2.abstract(config, jnp.float32))
    filled = [(path, leaf.replace(arrays.pop(".".join(map(str, path))))) for path, leaf in nnx.to_flat_state(state)]
    assert not arrays
    return nnx.merge(graphdef, nnx.from_flat_state(filled)), experts


def one_segment(shape) -> Rows:
    """Whole rows of one segment."""
    return Rows(np.ones(shape, np.int32), np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape))


def test_clean_half_and_every_noised_block_are_the_engines_forward():
    config, state = SMALL.config, odd_state()
    clean = random_batch(0).tokens
    rows, length = clean.shape
    noised = np.where(np.random.default_rng(1).random(clean.shape) < 0.5, 1, clean)
    result = jitted_forward()(state.weights, state.bias, clean, noised, one_segment(clean.shape))
    model, experts = engine_parts(config, state.weights, state.bias)

    @functools.partial(jax.jit, static_argnames="window")
    def engine(tokens, start, cache, window):
        store, runner_state = ResidentExperts().init(experts)
        known = (jnp.full(tokens.shape, -1.0), jnp.zeros(tokens.shape, jnp.int32))
        seam = Experts(ResidentExperts(), store, runner_state, *known)
        valid = jnp.ones(tokens.shape, bool)
        return model(tokens, start, valid, cache, seam, block_length=BLOCK, window=window)

    empty = KVCache.zeros(config, rows, length, jnp.float32)
    whole = engine(clean, np.zeros(rows, np.int32), empty, window=0)
    np.testing.assert_allclose(result.clean, whole.hidden, atol=2e-5)
    assert np.std(whole.hidden) > 0.5
    cache = KVCache(whole.keys, whole.values)
    for start in range(0, length, BLOCK):
        block = noised[:, start : start + BLOCK]
        step = engine(block, np.full(rows, start, np.int32), cache, window=length)
        np.testing.assert_allclose(result.noised[:, start : start + BLOCK], step.hidden, atol=2e-5)


def test_mask_is_the_definition():
    batch = random_batch(0)
    visible = np.asarray(visible_clean(Rows(batch.segment, batch.position)))
    rows, length = batch.tokens.shape
    for row in range(rows):
        block = batch.position[row] // BLOCK
        for query, key in itertools.product(range(length), range(length)):
            together = batch.segment[row, query] == batch.segment[row, key]
            assert visible[row, query, key] == (together and block[key] <= block[query])
            assert visible[row, length + query, key] == (together and block[key] < block[query])


def test_segments_of_a_row_do_not_see_each_other_nor_padding():
    state, batch = odd_state(), random_batch(3)
    noised = np.where(np.random.default_rng(1).random(batch.tokens.shape) < 0.5, 1, batch.tokens)
    packed = jitted_forward()(state.weights, state.bias, batch.tokens, noised, Rows(batch.segment, batch.position))
    for row, number in ((0, 1), (0, 2), (1, 1)):
        there = batch.segment[row] == number
        length = int(there.sum())
        tokens = np.zeros((2, *batch.tokens.shape), np.int32)
        tokens[:, 0, :length] = batch.tokens[row, there], noised[row, there]
        segment = np.zeros(batch.tokens.shape, np.int32)
        segment[0, :length] = 1
        alone = Rows(segment, one_segment(segment.shape).position)
        result = jitted_forward()(state.weights, state.bias, *tokens, alone)
        np.testing.assert_allclose(packed.clean[row, there], result.clean[0, :length], atol=2e-5)
        np.testing.assert_allclose(packed.noised[row, there], result.noised[0, :length], atol=2e-5)
    counted = 2 * int((batch.segment > 0).sum()) * SMALL.config.num_experts_per_tok
    np.testing.assert_array_equal(packed.load.sum(axis=1), counted)


@pytest.mark.parametrize("preset", [TINY, DEMO, ROUTING], ids=lambda preset: preset.name)
def test_routing_is_the_engines(preset):
    config = preset.config

    @jax.jit
    def both(x, bias):
        router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
        router.expert_bias[...] = bias
        return router(x, jnp.ones((1, 64), bool)), route(config, x[0], router.weight[...], bias)

    x = np.random.default_rng(0).normal(size=(1, 64, config.hidden_size)).astype(np.float32)
    bias = 0.1 * np.random.default_rng(1).normal(size=config.num_experts).astype(np.float32)
    (ids, weights), choice = both(x, bias)
    np.testing.assert_array_equal(choice.ids, ids[0])
    of_chosen = np.take_along_axis(np.asarray(choice.gates), np.asarray(ids[0]), axis=1)
    np.testing.assert_allclose(of_chosen, weights[0], rtol=1e-6)
    np.testing.assert_array_equal(np.count_nonzero(choice.gates, axis=1), config.num_experts_per_tok)
    np.testing.assert_array_equal(np.asarray(choice.gates) > 0, choice.chosen)


def layer_inputs(tokens=24, hidden=8, experts=6, width=4, chosen=2):
    """x, ids, gates, gate_up and down of one small layer."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    gates = np.zeros((tokens, experts))
    np.put_along_axis(gates, ids, rng.uniform(0.1, 1, ids.shape), axis=1)
    shapes = ((tokens, hidden), (experts, 2 * width, hidden), (experts, width, hidden))
    x, gate_up, down = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, ids, gates.astype(np.float32), gate_up, down


dense = jax.jit(expert_products.dense)
gathered = jax.jit(expert_products.gathered, static_argnames="slots")


def test_dense_experts_are_the_sum_over_the_chosen_ones():
    x, ids, gates, gate_up, down = layer_inputs()
    expected = np.zeros_like(x)
    for token, experts in enumerate(ids):
        for expert in experts:
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            expected[token] += gates[token, expert] * (gate / (1 + np.exp(-gate)) * up) @ down[expert]
    np.testing.assert_allclose(dense(x, gates, gate_up, down), expected, rtol=1e-4, atol=1e-5)


def test_gathered_experts_equal_dense_ones_and_so_do_the_gradients():
    x, ids, gates, gate_up, down = layer_inputs()
    aim = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)

    @jax.jit
    def both(*arrays):
        def by_dense(x, gates, gate_up, down):
            return jnp.sum(aim * dense(x, gates, gate_up, down))

        def by_gathered(x, gates, gate_up, down):
            return jnp.sum(aim * gathered(x, ids, gates, gate_up, down, slots=len(x))[0])

        return [jax.value_and_grad(f, argnums=(0, 1, 2, 3))(*arrays) for f in (by_dense, by_gathered)]

    (one, one_gradient), (other, other_gradient) = both(x, gates, gate_up, down)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    for name, a, b in zip(("x", "gates", "gate_up", "down"), one_gradient, other_gradient, strict=True):
        if name == "gates":  # of experts that were not chosen nothing is computed; the router passes none back to them
            a = jnp.where(gates > 0, a, 0.0)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


def test_gathered_experts_leave_out_the_later_tokens_of_a_full_expert():
    x, ids, gates, gate_up, down = layer_inputs()
    slots = 4
    y, dropped = gathered(x, ids, gates, gate_up, down, slots=slots)
    kept, seen = np.array(gates), [0] * len(gate_up)
    for token, experts in enumerate(np.asarray(ids)):
        for expert in experts:
            seen[expert] += 1
            if seen[expert] > slots:
                kept[token, expert] = 0
    assert np.isclose(dropped, sum(max(0, n - slots) for n in seen) / ids.size) and dropped > 0
    np.testing.assert_allclose(y, dense(x, kept, gate_up, down), rtol=1e-4, atol=1e-5)


def test_slots_leave_the_room_asked_for():
    assert slots_per_expert(32768, ROUTING.config, 1.5) == 1536
    assert slots_per_expert(16, ROUTING.config, 100.0) == 16


def test_both_ways_of_embedding_have_the_same_value_and_gradient():
    table, aim = np.arange(64, dtype=np.float32).reshape(16, 4), np.arange(32, dtype=np.float32).reshape(2, 4, 4) - 9
    tokens = np.asarray([[1, 1, 1, 5], [0, 1, 5, 15]])
    matmul, scatter = (
        jax.jit(jax.value_and_grad(lambda table, way=way: jnp.sum(aim * embed(table, tokens, way))))(table)
        for way in ("matmul", "scatter")
    )
    np.testing.assert_allclose(matmul[0], scatter[0], rtol=1e-6)
    np.testing.assert_allclose(matmul[1], scatter[1], rtol=1e-6)


def test_noise_masks_answers_only_and_weighs_by_the_ratio():
    batch = random_batch(0, rows=64, blocks=8)
    noised, masked, weight = objective.noise(jax.random.key(0), batch.tokens, batch.answer, SMALL.recipe, 1)
    np.testing.assert_array_equal(noised, np.where(masked, 1, batch.tokens))
    assert not np.any(masked & ~batch.answer)
    ratio = 1 / np.asarray(weight)
    assert ratio.min() >= 0.0499 and ratio.max() <= 1.001 and ratio.std() > 0.2
    blocks = ratio.reshape(64, 8, BLOCK)
    np.testing.assert_array_equal(blocks, np.broadcast_to(blocks[:, :, :1], blocks.shape))
    full = np.asarray(batch.answer.reshape(64, 8, BLOCK).all(-1))
    hidden = np.asarray(masked).reshape(64, 8, BLOCK).mean(-1)
    assert abs((hidden - blocks[:, :, 0])[full].mean()) < 0.01
    assert np.corrcoef(hidden[full], blocks[:, :, 0][full])[0, 1] > 0.9


def by_hand(logits, tokens, masked, weight, answers, sharpening):
    """The loss, term by term."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    total = 0.0
    for row, column in zip(*np.nonzero(masked), strict=True):
        of_token = p[row, column]
        term = -np.log(of_token[tokens[row, column]])
        if of_token.argmax() == tokens[row, column]:
            term -= sharpening * np.sum(of_token * np.log(of_token))
        total += weight[row, column] * term
    return total / answers


def test_loss_and_counts_are_those_of_the_definition():
    state, batch, key = odd_state(), random_batch(5, rows=12), jax.random.key(3)
    noised, masked, weight = map(np.asarray, objective.noise(key, batch.tokens, batch.answer, SMALL.recipe, 1))
    rows = Rows(batch.segment, batch.position)
    weights = dict(state.weights, **{layout.LM_HEAD: state.weights[layout.LM_HEAD] * 40})  # so that some are confident

    @jax.jit
    def both(weights):
        result = forward(SMALL.config, SMALL.recipe, weights, state.bias, batch.tokens, noised, rows)
        loss, sums = objective.objective(SMALL, weights, state.bias, batch, key, jnp.float32(3.0), len(KINDS))
        return loss, sums, head(weights, result.noised)

    loss, sums, logits = jax.tree.map(np.asarray, both(weights))
    logits = logits.astype(np.float64)
    np.testing.assert_allclose(loss, by_hand(logits, batch.tokens, masked, weight, batch.answer.sum(), 3.0), rtol=1e-4)
    assert not np.isclose(loss, by_hand(logits, batch.tokens, masked, weight, batch.answer.sum(), 0.0), rtol=1e-3)
    counted = masked & (batch.tokens != 0)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)).max(-1)
    for kind in range(len(KINDS)):
        of_kind = counted & (batch.kind == kind)
        assert sums.masked[kind] == of_kind.sum()
        assert sums.correct[kind] == (of_kind & (logits.argmax(-1) == batch.tokens)).sum()
        assert sums.confident[kind] == (of_kind & (p > 0.9)).sum()
    assert sums.confident.sum() > 0


def run(state, batches, out_of_time=lambda: False, reports=None):
    reports = [] if reports is None else reports
    return run_steps(
        compiled_step(),
        SMALL,
        KINDS,
        state,
        batches,
        7,
        out_of_time=out_of_time,
        every=20,
        on_report=lambda report, _: reports.append(report),
    )


def numbered(first=0):
    return ((step, random_batch(step)) for step in itertools.count(first))


@pytest.mark.parametrize("experts", ["dense", "gathered"])
def test_products_of_the_backward_pass_are_of_bfloat16_but_for_the_router(experts):
    recipe = dataclasses.replace(SMALL.recipe, dtype="bfloat16", experts=experts)
    preset = dataclasses.replace(SMALL, recipe=recipe)
    state, sums = abstract_state(preset), objective.no_sums(preset.config, len(KINDS))
    text = jitted_step(preset, len(KINDS)).lower(state, sums, random_batch(0), np.uint32(0)).as_text()
    products = re.findall(r"dot_general.* : \(tensor<(\S+)>, tensor<(\S+)>\)", text)
    assert len(products) > 30
    wide = [operands for operands in products if not all(operand.endswith("bf16") for operand in operands)]
    assert len(wide) == 3 * len(preset.config.moe_layers)  # forward, and the gradients of both operands
    assert all(operand.endswith("xf32") for operands in wide for operand in operands)


def test_loss_falls_on_one_batch():
    reports, batch = [], random_batch(0)
    batch = batch._replace(tokens=2 + batch.tokens % 3)
    state = run(first_state(0), ((step, batch) for step in itertools.count()), reports=reports)
    assert [report.step for report in reports] == [20, 40, 60] and int(state.step) == 60
    assert max(reports[1].loss, reports[2].loss) < 0.6 * reports[0].loss
    assert set(reports[0].by_kind) == {"text", "copy"}
    assert "step 60: loss" in reports[2].line()


def stop_after(steps):
    ticks = itertools.count()
    return lambda: next(ticks) >= steps


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    whole = run(first_state(1), numbered(), stop_after(24))
    half = run(first_state(1), numbered(), stop_after(11))
    assert int(half.step) == 11
    saving.save(tmp_path, half)
    found = saving.restore(tmp_path, abstract_state(SMALL))
    resumed = run(found, numbered(11), stop_after(13))
    assert int(resumed.step) == 24
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    saving.save(tmp_path, resumed)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000024"]


def test_a_run_is_resumed_as_it_was_begun_or_not_at_all(tmp_path):
    saving.open_run(tmp_path / "a", {"model": "demo", "seed": 0}, resume=False)
    saving.open_run(tmp_path / "a", {"model": "demo", "seed": 0}, resume=True)
    with pytest.raises(OledError, match="holds a run: add --resume"):
        saving.open_run(tmp_path / "a", {"model": "demo", "seed": 0}, resume=False)
    with pytest.raises(OledError, match="holds another run: seed was 0, is 1"):
        saving.open_run(tmp_path / "a", {"model": "demo", "seed": 1}, resume=True)
    assert saving.restore(tmp_path / "a", abstract_state(SMALL)) is None


def test_biases_move_the_load_towards_even_and_not_the_gates():
    config = DEMO.config
    rng = np.random.default_rng(0)
    x = rng.normal(0.3, 1, (512, config.hidden_size)).astype(np.float32)
    weight = rng.normal(0, 0.05, (config.num_experts, config.hidden_size)).astype(np.float32)
    weight[:8] += 0.02

    @jax.jit
    def move(bias):
        load = jnp.sum(route(config, x, weight, bias).chosen, axis=0, dtype=jnp.float32)
        return balanced(bias[None], load[None], 0.005)[0], load

    bias, before = move(jnp.zeros(config.num_experts))
    for _ in range(200):
        bias, after = move(bias)
    before, after = (load_report(np.asarray(load)[None]) for load in (before, after))
    assert before["cv"][0] > 0.5 and before["dead"][0] > 0
    assert after["cv"][0] < 0.2 * before["cv"][0] and after["dead"][0] == 0 and after["min"][0] > 0.7


def test_load_report_counts_in_even_shares():
    report = load_report(np.asarray([[0.0, 1.0, 2.0, 37.0], [5.0, 5.0, 5.0, 5.0]]))
    assert report["min"] == [0.0, 1.0] and report["max"] == [3.7, 1.0] and report["dead"] == [1, 0]


def test_export_loads_in_the_engine_with_the_weights_that_were_trained(tmp_path):
    state = odd_state()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("kept")
    for _ in range(2):  # the second time in place of the first
        size = export(tmp_path / "model", SMALL.config, state.weights, state.bias, tmp_path / "tokenizer")
    assert size == sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"]
    engine = Engine.load(tmp_path / "model", dtype="float32")
    tokens = random_batch(2).tokens
    weights = {name: array.astype(jnp.bfloat16).astype(jnp.float32) for name, array in state.weights.items()}
    result = jitted_forward()(weights, state.bias, tokens, tokens, one_segment(tokens.shape))
    np.testing.assert_allclose(engine.logits(tokens, BLOCK), head(weights, result.clean), atol=1e-4)
    assert (engine.special_ids.mask_id, engine.special_ids.eos_id) == (1, (0,))


def published_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes of the tensors as exported, and of their names in the file's header, about."""
    shapes = layout.published_shapes(config)
    width = {name: 4 if name.endswith(".expert_bias") else 2 for name in shapes}
    tensors = sum(width[name] * count({name: shape}) for name, shape in shapes.items())
    return tensors, sum(len(name) + 80 for name in shapes)


def test_demo_preset_fits_its_sixteen_megabytes():
    config = DEMO.config
    tensors, header = published_bytes(config)
    tokenizer = 150_000
    assert tensors + header + tokenizer <= 16_000_000
    assert count(weight_shapes(config)) <= 8_000_000
    assert config.num_experts >= 64 and config.num_experts_per_tok >= 4 and config.topk_group < config.n_group
    assert config.num_shared_experts == config.first_k_dense_replace == 1


def test_routing_preset_routes_as_llada2_mini():
    mini, config = ModelConfig.from_preset("llada2.0-mini"), ROUTING.config
    keys = ("num_hidden_layers", "first_k_dense_replace", "num_experts", "num_experts_per_tok", "num_shared_experts")
    for key in (*keys, "n_group", "topk_group", "routed_scaling_factor", "partial_rotary_factor"):
        assert getattr(config, key) == getattr(mini, key), key


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_weight_of_a_preset_has_a_sensible_start(preset):
    shapes = abstract_state(preset)
    assert {name: array.shape for name, array in shapes.weights.items()} == weight_shapes(preset.config)
    assert all(array.dtype == jnp.float32 for array in jax.tree.leaves((shapes.weights, shapes.bias)))


def test_profile_tables_sum_by_scope_and_direction():
    assert scope_of("jit(step)/jvp(experts)/dot_general") == "experts forward"
    assert scope_of("jit(step)/transpose(jvp(shared_experts))/mul") == "shared_experts backward"
    assert scope_of("jit(step)/add") == "(other) add"
    names = {"a": "jit(s)/jvp(experts)/dot", "b": "jit(s)/jvp(experts)/mul"}
    text = tables({"a": (4e6, 2), "b": (2e6, 2), "c": (1e6, 4)}, names, steps=2, wall_ms=5.0)
    first = text.splitlines()
    assert first[0].startswith("busy 3.50 ms of 5.00 ms a step")
    assert first[1].split() == ["3.000", "ms", "2.0x", "experts", "forward"]
    assert first[2].split() == ["0.500", "ms", "2.0x", "(unknown)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llada3"], "unknown model 'llada3': the models are demo, routing, tiny"),
        (["--model", "tiny", "--experts", "some"], "experts is 'some': give dense or gathered"),
        (["--model", "tiny", "--steps", "0"], "steps is 0: give at least 1"),
        (["--model", "tiny", "--tasks", "juggle"], "there is no task 'juggle'"),
        (["--model", "tiny", "--steps", "many"], "invalid int value: 'many'"),
        (["--model", "tiny", "--seed", "-1"], "seed is -1"),
        (["--model", "tiny", "--out", "/dev/null/run"], "/dev/null/run"),
    ],
)
def test_a_mistake_is_one_line_and_makes_nothing(tmp_path, capsys, options, message):
    assert main.main(["--out", str(tmp_path / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commands_train_resume_export_and_evaluate(tmp_path):
    out, folder = tmp_path / "run", Path(main.__file__).parent
    options = ["--model", "tiny", "--out", out, "--steps", "6", "--every", "3", "--tasks", "add", "--text", "0"]
    train = [sys.executable, folder / "main.py", *options, "--workers", "1", "--batch", "2"]
    first = subprocess.run([*train, "--minutes", "0", "--reserve", "0"], capture_output=True, text=True, check=True)
    assert "6 to go (--resume)" in first.stdout
    again = subprocess.run([*train, "--resume"], capture_output=True, text=True, check=True)
    assert "step 6: loss" in again.stdout and "complete" in again.stdout and "held out: accuracy" in again.stdout
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [3, 6] and set(entries[1]["held_out"]["by_kind"]) == {"add"}
    options = ["--model", out / "model", "--per-task", "2", "--tasks", "add", "--gen-length", "32", "--compare"]
    command = [sys.executable, folder / "evaluate.py", *options, "--json", tmp_path / "scores.json"]
    subprocess.run(command, capture_output=True, check=True)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["all"]["examples"] == 2 and set(scores["tasks"]) == {"add"}
    assert 1 <= scores["all"]["positions_per_forward"] <= 32
    assert 0 < scores["all"]["tokens_per_forward"] <= scores["all"]["positions_per_forward"]
    shares = {name: share for name, share in scores["comparison"].items() if name.startswith("float32")}
    assert len(shares) == 3 and set(shares.values()) == {1.0}
