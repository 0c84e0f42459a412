"""What callers pass in: nothing is converted silently, and every mistake is an OledError that shows the value."""

import numpy as np
import pytest

from oled_jax import Editing, Engine, Levenshtein, ModelConfig, OledError, Threshold
from oled_jax.arguments import integer, token_ids
from tests.golden_fixtures import GOLDEN, engine

RULE = Threshold(block_length=8, mask_id=319, eos_id=316)


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint16), iter([1, 2]), range(1, 3)]
)
def test_token_ids_of_every_integer_kind(ids):
    assert token_ids("prompt", ids, 10) == [1, 2]


NO_IDS = [None, 3, 3.5, "12", b"12", ["1"], [1.0], np.array([1.0]), np.array(3), [[1, 2], [3]], np.ones((2, 2), int)]
NO_IDS += [[None], [float("nan")], {1, 2}, {1: 2}, [True], [10], [-1], [2**70]]


@pytest.mark.parametrize("ids", NO_IDS)
def test_what_is_no_list_of_token_ids(ids):
    with pytest.raises(OledError, match="token id"):
        token_ids("prompt", ids, 10)


@pytest.mark.parametrize("value", [None, 1.5, "3", True, [1], float("nan"), float("inf"), -1, 11])
def test_what_is_no_integer_in_range(value):
    with pytest.raises(OledError, match=r"^n is .*from 0 to 10"):
        integer("n", value, 0, 10)


@pytest.mark.parametrize("rule", [None, Threshold, "threshold", {}])
def test_what_is_no_rule(rule):
    with pytest.raises(OledError, match="rule is"):
        engine("llada2-tiny-f32").generate([1], rule, gen_length=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": None}, "prompts is None"),
        ({"prompts": "ab"}, "prompts is 'ab'"),
        ({"prompts": [1, 2]}, "a prompt is 1"),
        ({"seeds": 3}, "one seed for each"),
        ({"seeds": [1, 2]}, "one seed for each"),
        ({"seeds": [1.5]}, "seed is 1.5"),
        ({"gen_length": 2.0}, "gen_length is 2.0"),
        ({"on_step": 3}, "on_step is 3"),
    ],
)
def test_batch_arguments(arguments, words):
    good = {"prompts": [[1, 2]], "gen_length": 4}
    with pytest.raises(OledError, match=words):
        engine("llada2-tiny-f32").generate_batch(rule=RULE, **{**good, **arguments})


@pytest.mark.parametrize("ids", [None, 3, [], [[]], [[1, 2], [3]], [1, 2]])
def test_logits_arguments(ids):
    with pytest.raises(OledError):
        engine("llada2-tiny-f32").logits(ids, 8)


@pytest.mark.parametrize("path", [None, 3, b"x", ["a"], "x" * 5000, "a\0b", ""])
def test_load_of_what_is_no_path(path):
    with pytest.raises(OledError):
        Engine.load(path)


def test_load_of_what_is_no_dtype():
    with pytest.raises(OledError, match="dtype is"):
        Engine.load(GOLDEN / "llada2-tiny-f32", dtype=["float32"])


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (Editing, "max_post_steps"),
        (Editing, "num_to_transfer"),
        (Levenshtein, "steps"),
        (Levenshtein, "max_steps_per_block"),
        (Threshold, "eos_early_stop"),
    ],
)
def test_rule_fields_beyond_what_a_step_can_hold(rule, field):
    with pytest.raises(OledError, match=field):
        rule(**{field: 2**31})


CONFIG = ModelConfig.from_hf(GOLDEN / "llada2-tiny-f32").to_hf()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("routed_scaling_factor", float("nan")),
        ("rms_norm_eps", 10**400),
        ("hidden_size", 10**400),
        ("partial_rotary_factor", "x"),
        ("partial_rotary_factor", [1]),
        ("partial_rotary_factor", float("nan")),
        ("rope_parameters", "abc"),
        ("rope_parameters", [1]),
        ("num_experts", 10**8),
        ("num_hidden_layers", 10**9),
        ("expert_capacity", -1),
    ],
)
def test_config_values_that_are_no_model(key, value):
    with pytest.raises(OledError, match="config: ") as caught:
        ModelConfig.from_hf({**CONFIG, key: value})
    assert len(str(caught.value)) < 400


def test_null_means_absent():
    assert ModelConfig.from_hf({**CONFIG, "partial_rotary_factor": None}).partial_rotary_factor == 0.5
    nested = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": None}
    assert ModelConfig.from_hf({**CONFIG, "rope_parameters": nested}).rope_theta == 5000.0


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' + "9" * 6000 + "}", "\ufeff{}", ""])
def test_files_that_are_no_json(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OledError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
