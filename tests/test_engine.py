"""The engine end to end: the reference's tokens, cache against no cache, batches, compilations, mistakes."""

import dataclasses
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from oled_jax import Editing, Engine, Levenshtein, OledError, Threshold
from oled_jax.checkpoint import open_checkpoint
from oled_jax.convert.to_orbax import to_orbax
from oled_jax.decoding.programs import window_for
from oled_jax.loading import load_weights
from oled_jax.model.kv_cache import KVCache
from oled_jax.retention import StepRecord
from tests.decoding import reference
from tests.golden_fixtures import BFLOAT16, CONTEXT, FLOAT32, GOLDEN, cases, engine, forward, rule_of

TINY, BLOCKWISE = "llada2-tiny-f32", "llada22-tiny-f32"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that mean nothing special in the fixtures' vocabularies."""
    return np.random.default_rng([seed, length]).integers(0, 300, length).tolist()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "22" not in name else name for name in FLOAT32]
)
def test_every_recorded_generation_comes_out(name):
    for kind, index, case in cases(name):
        out = engine(name).generate(case["prompt_ids"], rule_of(kind, case), gen_length=case["gen_length"])
        assert out.tokens == case["output_ids"], f"{kind} {index}"
        assert out.num_forwards == case.get("num_forwards", out.num_forwards), f"{kind} {index}"
        assert out.finished == (case["eos_id"] in case["output_ids"])


@pytest.mark.parametrize("name", [*FLOAT32, BFLOAT16])
def test_logits_in_chunks(name):
    fixture = forward(name)
    logits = engine(name).logits(fixture["input_ids"], int(fixture["block_length"]))
    assert logits.dtype == np.float32
    difference = np.abs(logits - fixture["logits"])
    if name == BFLOAT16:
        assert difference.mean() <= 0.13
        assert np.mean(logits.argmax(-1) == fixture["logits"].argmax(-1)) >= 0.96
    else:
        assert difference.max() <= 5e-4


@pytest.mark.parametrize("name", [*FLOAT32, BFLOAT16])
def test_converted_fixtures_load_to_the_same_arrays(name, tmp_path):
    """What holds for the published folder then holds for the converted one: the programs are the same."""
    with open_checkpoint(GOLDEN / name) as source:
        to_orbax(source, tmp_path / "converted")
        published = load_weights(source, source.weight_dtype)
    with open_checkpoint(tmp_path / "converted") as converted:
        assert converted.format == "orbax"
        loaded = load_weights(converted, converted.weight_dtype)
    for ours, theirs in zip(*(jax.tree.leaves((nnx.state(m), e)) for m, e in (published, loaded)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_a_converted_folder_generates_the_recorded_tokens(tmp_path):
    with open_checkpoint(GOLDEN / BLOCKWISE) as source:
        to_orbax(source, tmp_path / "converted")
    eng = Engine.load(tmp_path / "converted", context_length=CONTEXT)
    kind, _, case = cases(BLOCKWISE)[0]
    out = eng.generate(case["prompt_ids"], rule_of(kind, case), gen_length=case["gen_length"])
    assert (out.tokens, out.num_forwards) == (case["output_ids"], case["num_forwards"])


def test_logits_of_a_partial_block_do_not_see_the_padding():
    ids = forward(TINY)["input_ids"]
    whole = engine(TINY).logits(ids[:, :13], 8)
    assert whole.shape == (2, 13, 320)
    np.testing.assert_allclose(engine(TINY).logits(ids, 8)[:, :8], whole[:, :8], atol=1e-4)
    np.testing.assert_allclose(engine(TINY).logits(ids[:1, :13], 8), whole[:1], atol=1e-4)


@pytest.mark.slow
def test_cached_decoding_gives_the_tokens_of_uncached():
    """Prompts of 1 to 2 * block + 1 tokens: each step of the oracle computes the whole prefix anew."""
    rule = Threshold(block_length=8, steps=5, threshold=0.3, mask_id=319, eos_id=316)
    for length in range(1, 18):
        ids = prompt(length)
        out = engine(TINY).generate(ids, rule, gen_length=12)
        tokens, forwards = uncached(engine(TINY), ids, rule, 12)
        assert out.tokens == tokens, length
        assert out.num_forwards == forwards, length


def uncached(eng: Engine, ids: list[int], rule: Threshold, gen_length: int) -> tuple[list[int], int]:
    """Spec 5.1 over whole sequences, with ``Engine.logits`` on everything up to the block's end at each step."""
    length, total = rule.block_length, 0
    blocks = -(-(len(ids) + gen_length) // length)
    x = ids + [rule.mask_id] * (blocks * length - len(ids))
    for b in range(len(ids) // length, blocks):
        start, end = b * length, (b + 1) * length

        def whole(block, start=start, end=end):
            return eng.logits([x[:start] + block], length)[0, start:end]

        previous = x[len(ids) : start]
        block, forwards, _ = reference.threshold(whole, x[start:end], start, len(ids), previous, rule, gen_length)
        x[start:end], total = block, total + forwards
        if rule.eos_id in x[len(ids) : end]:
            break
    answer = x[len(ids) : len(ids) + gen_length]
    return (answer[: answer.index(rule.eos_id) + 1] if rule.eos_id in answer else answer), total


RULES = {
    TINY: [
        Threshold(block_length=8, steps=8, threshold=0.4, mask_id=319, eos_id=(316, 134)),
        Editing(block_length=8, threshold=0.5, editing_threshold=0.2, eos_early_stop=True, mask_id=319, eos_id=134),
        Threshold(block_length=8, threshold=0.4, temperature=0.8, top_k=20, top_p=0.9, mask_id=319, eos_id=316),
    ],
    BLOCKWISE: [
        Levenshtein(block_length=8, mask_id=319, eos_id=316, delete_token_id=310, split_token_id=311),
        Threshold(block_length=16, threshold=0.2, mask_id=319, eos_id=316),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name in RULES for rule in RULES[name]])
def test_a_batch_gives_the_tokens_that_each_prompt_gives_alone(name, rule):
    prompts = [prompt(length, seed=1) for length in (3, 8, 21)]
    seeds = [5, 5, 9]
    together = engine(name).generate_batch(prompts, rule, gen_length=20, seeds=seeds)
    for ids, seed, out in zip(prompts, seeds, together, strict=True):
        alone = engine(name).generate(ids, rule, gen_length=20, seed=seed)
        assert out.tokens == alone.tokens
        assert (out.num_forwards, out.num_commits) == (alone.num_forwards, alone.num_commits)


def test_sampling_depends_on_the_seed_and_only_on_it():
    rule = RULES[TINY][2]
    first, again, other = (engine(TINY).generate(prompt(5), rule, gen_length=16, seed=s).tokens for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_block_routing_beside_another_request():
    """A routing window never reaches across requests, and a window's logits do not depend on its neighbours."""
    ids = np.stack([forward(BLOCKWISE)["input_ids"][0], np.arange(40)])
    together = engine(BLOCKWISE).logits(ids, 8)
    alone = engine(BLOCKWISE).logits(ids[:1], 8)
    np.testing.assert_allclose(together[:1], alone, atol=1e-4)


@pytest.mark.slow
def test_no_compilation_after_warm_up():
    eng = Engine.load(GOLDEN / TINY, context_length=CONTEXT_WITH_TWO_WINDOWS)
    rule = Threshold(block_length=8, threshold=0.9, mask_id=319, eos_id=316)

    def run(threshold: float, offset: int):
        for length in (5, 40, 300):
            changed = dataclasses.replace(rule, threshold=threshold, steps=7, mask_id=318)
            eng.generate(prompt(length + offset), changed, gen_length=30, seed=offset)

    run(0.9, 0)
    programs, compiled = eng.programs.compiled, []

    def listen(event, seconds, **_):
        if event == COMPILE_EVENT:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    run(0.3, 2)
    listened, _ = list(compiled), jax.jit(lambda x: x + 17)(1.0)
    assert listened == []
    assert compiled, "the listener must hear compilations at all"
    assert eng.programs.compiled == programs


CONTEXT_WITH_TWO_WINDOWS = 400


def test_windows_are_few():
    cache = KVCache.zeros(engine(TINY).config, 1, 2000, np.float32)
    assert {window_for(cache, start) for start in range(2001)} == {256, 512, 1024, 2000}
    assert all(window_for(cache, start) >= start for start in range(2001))


@pytest.mark.slow
def test_cache_is_never_copied():
    """The same windows over a longer cache need no more workspace, and what writes the cache does so in place."""
    rule = Threshold(block_length=8, mask_id=319, eos_id=316)
    workspace = []
    for context in (256, 512):
        eng = Engine.load(GOLDEN / TINY, context_length=context)
        eng.generate_batch([prompt(9), prompt(20)], rule, gen_length=8)
        memory = {kind: eng.programs.memory(kind) for kind in ("prefill", "denoise", "commit")}
        cache_bytes = 2 * KVCache.zeros(eng.config, 2, context, np.float32).keys.nbytes
        assert memory["commit"].alias_size_in_bytes >= cache_bytes
        workspace.append({kind: figures.temp_size_in_bytes for kind, figures in memory.items()})
    assert workspace[0] == workspace[1]


def test_events_tell_steps_and_blocks():
    steps, blocks = [], []
    rule = Threshold(block_length=8, steps=4, threshold=0.9, mask_id=319, eos_id=316)
    out = engine(TINY).generate(prompt(11), rule, gen_length=14, on_step=steps.append, on_block=blocks.append)
    assert len(steps) == out.num_forwards
    assert [b.block for b in blocks] == [1, 2, 3]
    assert [b.num_forwards for b in blocks] == [sum(s.block == b.block for s in steps) for b in blocks]
    assert [s.num_prompt for s in steps if s.block == 1] == [3] * blocks[0].num_forwards
    assert steps[0].block_start == 8
    assert [(b.block_start, b.num_prompt) for b in blocks] == [(8, 3), (16, 0), (24, 0)]
    assert np.concatenate([b.tokens for b in blocks])[3 : 3 + 14].tolist() == out.tokens
    masks = [np.sum(s.tokens == 319) for s in steps if s.block == 2]
    assert masks == sorted(masks, reverse=True)
    assert out.num_commits == 2


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_generation_leaves_the_engine_usable(failure):
    rule = Threshold(block_length=8, threshold=0.9, mask_id=319, eos_id=316)
    before = engine(TINY).generate(prompt(11), rule, gen_length=14).tokens

    def fail(event):
        if event.step == 2:
            raise failure

    with pytest.raises(failure):
        engine(TINY).generate(prompt(11), rule, gen_length=14, on_step=fail)
    assert engine(TINY).generate(prompt(11), rule, gen_length=14).tokens == before


@pytest.mark.parametrize("callback", ["on_record", "on_step", "on_block"])
def test_a_callback_cannot_use_its_engine_and_the_generation_stays_right(callback):
    eng, records, refused = engine(TINY), [], []
    ids = prompt(11)
    expected = eng.generate(ids, GOOD, gen_length=14, on_record=records.append)

    def nested(event):
        for call in (lambda: eng.generate([1], GOOD, gen_length=4), lambda: eng.logits([[1]], 8)):
            with pytest.raises(OledError, match="this engine is running already: wait until it has returned") as caught:
                call()
            refused.append(caught.value)

    again = []
    listeners = {"on_record": again.append} | {callback: lambda event: (nested(event), again.append(event))}
    out = eng.generate(ids, GOOD, gen_length=14, **listeners)
    assert (out.tokens, out.metrics.experts) == (expected.tokens, expected.metrics.experts)
    assert len(refused) >= 2
    seen = [record for record in again if isinstance(record, StepRecord)]
    assert len(seen) == len(records)
    for ours, theirs in zip(seen, records, strict=True):
        np.testing.assert_array_equal(ours.routing.ids, theirs.routing.ids)


def test_another_thread_is_refused_while_the_engine_runs():
    eng, running, proceed = engine(TINY), threading.Event(), threading.Event()
    expected = eng.generate(prompt(11), GOOD, gen_length=14)

    def wait(event):
        running.set()
        proceed.wait()

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(eng.generate, prompt(11), GOOD, gen_length=14, on_step=wait)
        running.wait()
        try:
            with pytest.raises(OledError, match="this engine is running already"):
                eng.generate([1], GOOD, gen_length=4)
            with pytest.raises(OledError, match="this engine is running already"):
                eng.logits([[1]], 8)
        finally:
            proceed.set()
        assert outcome.result().tokens == expected.tokens
    assert eng.generate(prompt(11), GOOD, gen_length=14).tokens == expected.tokens


def test_metrics_add_up():
    out = engine(TINY).generate(prompt(11), Threshold(block_length=8, mask_id=319, eos_id=316), gen_length=14)
    m = out.metrics.to_json()
    assert (m["prompt_tokens"], m["generated_tokens"], m["num_blocks"]) == (11, len(out.tokens), 3)
    assert m["num_forwards"] == out.num_forwards
    assert m["tokens_per_forward"] == len(out.tokens) / out.num_forwards
    assert m["decode_seconds"] > 0


def test_masks_left_over_are_kept_and_counted():
    rule = Threshold(block_length=8, steps=8, threshold=1.0, mask_id=319, eos_id=316)
    # A forward cannot fill more than one position here, and the block's first position stays closed to the rule.
    out = engine(TINY).generate(prompt(8), dataclasses.replace(rule, block_length=16, steps=3), gen_length=16)
    assert out.metrics.masks_left == out.tokens.count(319)
    assert len(out.tokens) == 16


def test_dtype_option():
    ids = forward(BFLOAT16)["input_ids"]
    wide = Engine.load(GOLDEN / BFLOAT16, dtype="float32", context_length=64)
    assert wide.programs.dtype == np.float32
    logits = wide.logits(ids, 8)
    assert np.any(logits != logits.astype(jax.numpy.bfloat16))


def test_expert_bias_dtype_option(tmp_path):
    """The fixtures' biases are bfloat16 values already, so one is nudged to a value that is not."""
    folder = tmp_path / "nudged"
    shutil.copytree(GOLDEN / TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.gate.expert_bias"
    tensors[name] = tensors[name] + np.float32(0.1234567)
    save_file(tensors, folder / "model.safetensors")
    biases = []
    for option in ("checkpoint", "bfloat16"):
        with open_checkpoint(folder) as checkpoint:
            model, _ = load_weights(checkpoint, checkpoint.weight_dtype, expert_bias_dtype=option)
        biases.append(np.asarray(model.layers[2].mlp.gate.expert_bias[...]))
    np.testing.assert_array_equal(biases[0], tensors[name])
    np.testing.assert_array_equal(biases[1], tensors[name].astype(jax.numpy.bfloat16).astype(np.float32))
    assert np.any(biases[0] != biases[1])


GOOD = Threshold(block_length=8, mask_id=319, eos_id=316)


@pytest.mark.parametrize(
    ("ids", "rule", "arguments", "words"),
    [
        ([], GOOD, {}, "the prompt is empty"),
        ([1, 320], GOOD, {}, "token id 320 is out of range"),
        ([-1], GOOD, {}, "token id -1 is out of range"),
        ([1] * 128, GOOD, {}, "the prompt holds 128 tokens, and the context 128"),
        ([1] * 100, GOOD, {"gen_length": 29}, "lower gen_length .* at most 28"),
        ([1, 319], GOOD, {}, "the prompt holds token 319"),
        ([1], Threshold(block_length=129, mask_id=319, eos_id=316), {}, "block_length is 129"),
        ([1], GOOD, {"gen_length": 0}, "gen_length is 0"),
        ([1], GOOD, {"seed": -1}, "seed is -1"),
        ([1], Threshold(block_length=8, mask_id=320, eos_id=316), {}, "mask_id 320 is outside the vocabulary of 320"),
        ([1], Threshold(block_length=8, eos_id=316), {}, "mask id is unknown .* --mask-id"),
        ([1], Threshold(block_length=8, mask_id=319, eos_id=(316, 400)), {}, "eos_id 400 is outside"),
        ([1], Levenshtein(block_length=8, mask_id=319), {}, "--delete-token-id"),
    ],
)
def test_mistakes_are_one_clear_error(ids, rule, arguments, words):
    with pytest.raises(OledError, match=words) as caught:
        engine(TINY).generate(ids, rule, **{"gen_length": 8, **arguments})
    assert "\n" not in str(caught.value)


def test_block_length_must_fit_the_routing_windows():
    with pytest.raises(OledError, match="multiple of 8"):
        engine(BLOCKWISE).generate([1], dataclasses.replace(GOOD, block_length=12), gen_length=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"context_length": 0}, "context_length is 0"),
        ({"context_length": 513}, "context_length is 513.*512"),
        ({"expert_bias_dtype": "int8"}, "expert_bias_dtype is 'int8'"),
    ],
)
def test_bad_load_arguments(arguments, words):
    with pytest.raises(OledError, match=words):
        Engine.load(GOLDEN / TINY, **arguments)


def test_logits_mistakes():
    for ids, words in (
        ([[320]], "320"),
        ([1, 2], "a row of input_ids is 1"),
        ([[1.5]], "holds 1.5"),
        (np.zeros((1, 129), int), "129 tokens"),
    ):
        with pytest.raises(OledError, match=words):
            engine(TINY).logits(ids, 8)
    with pytest.raises(OledError, match="block_length is 0"):
        engine(TINY).logits([[1]], 0)
