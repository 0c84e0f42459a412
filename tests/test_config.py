"""Configs as published for 2.0, 2.1 and 2.2, what is refused, and the presets against the published counts."""

import dataclasses
import json
import math
import os

import pytest

from oled_jax.checkpoint import layout
from oled_jax.config import ModelConfig, preset_names, read_json_object
from oled_jax.errors import ConfigError

# Values and inert keys as in the published LLaDA2.0-mini and 2.1-mini.
PUBLISHED_20 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {"AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig"},
    "model_type": "llada2_moe",
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "transformers_version": "4.57.1",
    "use_bias": False,
    "use_cache": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
    "vocab_size": 157184,
}

_REMOVED_IN_22 = ("max_window_layers", "rope_theta", "rope_scaling", "sliding_window", "use_sliding_window")
PUBLISHED_22 = {key: value for key, value in PUBLISHED_20.items() if key not in _REMOVED_IN_22} | {
    "block_size": 32,
    "delete_token_id": 156930,
    "expert_capacity": 48,
    "max_position_embeddings": 131072,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 3000000, "rope_type": "default"},
    "split_token_id": 156931,
    "transformers_version": "5.2.0",
    "use_qk_norm": True,
}

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)

MINI, FLASH = (16_255_643_392, 14_813), (102_889_705_216, 24_161)
COUNTS = {
    "llada2.0-flash": FLASH,
    "llada2.0-mini": MINI,
    "llada2.1-flash": FLASH,
    "llada2.1-mini": MINI,
    "llada2.2-flash": FLASH,
    "llada2.2-mini": MINI,
}


def without(raw: dict, key: str) -> dict:
    return {k: v for k, v in raw.items() if k != key}


def test_published_20():
    config = ModelConfig.from_hf(PUBLISHED_20)
    assert config == ModelConfig.from_preset("llada2.0-mini")
    assert config.rope_theta == 600000.0 and config.rotary_dim == 64
    assert config.moe_layers == tuple(range(1, 20))
    assert not config.block_routing


def test_published_22():
    config = ModelConfig.from_hf(PUBLISHED_22)
    assert config == ModelConfig.from_preset("llada2.2-mini")
    assert config.rope_theta == 3000000.0 and config.rotary_dim == 64
    assert config.block_routing and (config.expert_capacity, config.block_size) == (48, 32)
    assert (config.delete_token_id, config.split_token_id) == (156930, 156931)


def test_22_with_rope_theta_outside_the_dictionary():
    flat = without(PUBLISHED_22, "rope_parameters") | {"rope_theta": 3000000}
    assert ModelConfig.from_hf(flat) == ModelConfig.from_hf(PUBLISHED_22)


def test_merged_training_checkpoints_have_their_own_model_type():
    assert ModelConfig.from_hf(PUBLISHED_20 | {"model_type": "llada2_moe_veomni"}) == ModelConfig.from_hf(PUBLISHED_20)


def test_fallbacks_are_the_models_values_and_not_the_classes():
    optional = ("head_dim", "n_group", "topk_group", "routed_scaling_factor", "partial_rotary_factor")
    stripped = {key: value for key, value in PUBLISHED_20.items() if key not in optional}
    assert ModelConfig.from_hf(stripped) == ModelConfig.from_hf(PUBLISHED_20)


def test_torch_dtype_is_the_older_name():
    older = without(PUBLISHED_20, "dtype") | {"torch_dtype": "float32"}
    assert ModelConfig.from_hf(older).dtype == "float32"


def test_ids_are_read_one_or_several():
    config = ModelConfig.from_hf(PUBLISHED_20 | {"eos_token_id": [156892, 156900], "mask_token_id": 156895})
    assert config.eos_token_id == (156892, 156900) and config.mask_token_id == 156895


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"^config: 1 problem: {key} is missing$"):
        ModelConfig.from_hf(without(PUBLISHED_20, key))


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", ["12", True, [1]])
def test_a_value_of_another_type_is_named(key, value):
    with pytest.raises(ConfigError, match=f"{key} is .*, expected an? (integer|number)"):
        ModelConfig.from_hf(PUBLISHED_20 | {key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu' is implemented"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and only False"),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling asks for 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling asks for 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters asks for 'yarn'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_what_is_not_implemented_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(PUBLISHED_20 | changes)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (PUBLISHED_20, {"hidden_size": 0}, "hidden_size is 0, must be positive"),
        (PUBLISHED_20, {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, must be positive"),
        (PUBLISHED_20, {"first_k_dense_replace": 21}, "first_k_dense_replace is 21, must be 0 to 19"),
        (PUBLISHED_20, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, must be 0 to 19"),
        (PUBLISHED_20, {"first_k_dense_replace": 20}, r"is 20 of 20 \(num_hidden_layers\), which leaves no mixture-of"),
        (PUBLISHED_20, {"num_shared_experts": -1}, "num_shared_experts is -1"),
        (PUBLISHED_20, {"num_key_value_heads": 3}, "16 is no multiple of num_key_value_heads 3"),
        (PUBLISHED_20, {"partial_rotary_factor": 0.51}, "partial_rotary_factor 0.51 gives 65"),
        (PUBLISHED_20, {"num_experts": 252}, "num_experts 252 does not split into n_group 8"),
        (PUBLISHED_20, {"n_group": 256}, "num_experts 256 does not split into n_group 256"),
        (PUBLISHED_20, {"topk_group": 9}, "topk_group is 9, must be 1 to 8"),
        (PUBLISHED_20, {"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds the 128"),
        (PUBLISHED_22, {"block_size": None}, "expert_capacity is 48, which needs a positive block_size"),
        (PUBLISHED_22, {"expert_capacity": 7}, r"expert_capacity is 7, must be 8 \(num_experts_per_tok\) to 256"),
    ],
)
def test_what_does_not_hold_together_is_refused(base, changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(base | changes)


def test_problems_are_reported_together():
    raw = without(without(PUBLISHED_20, "num_experts"), "rope_theta") | {"hidden_act": "relu", "vocab_size": "many"}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(raw)
    message = str(caught.value)
    assert message.startswith("config: 4 problems: ")
    for part in ("num_experts is missing", "rope_theta is missing", "hidden_act is 'relu'", "vocab_size is 'many'"):
        assert part in message


@pytest.mark.parametrize("model_type", ["llama", None])
def test_another_model_type_is_named(model_type):
    with pytest.raises(ConfigError, match=f"model_type is {model_type!r}"):
        ModelConfig.from_hf({"model_type": model_type})


def test_a_path_may_be_the_file_or_its_folder(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelConfig.from_hf(tmp_path)
    file.write_text("{not json")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        ModelConfig.from_hf(file)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="holds list, expected a JSON object"):
        ModelConfig.from_hf(file)
    file.write_text(json.dumps(PUBLISHED_20))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(str(file)) == ModelConfig.from_hf(PUBLISHED_20)


def test_presets_are_those_of_the_family():
    assert set(preset_names()) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_preset_has_the_published_counts(name):
    config = ModelConfig.from_preset(name)
    shapes = layout.published_shapes(config)
    assert (sum(map(math.prod, shapes.values())), len(shapes)) == COUNTS[name]
    held = layout.dense_shapes(config) | layout.expert_shapes(config)
    assert sum(map(math.prod, held.values())) == COUNTS[name][0]


@pytest.mark.parametrize("name", COUNTS)
def test_to_hf_round_trip(name):
    config = ModelConfig.from_preset(name)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    stops = dataclasses.replace(config, eos_token_id=(1, 2), mask_token_id=3, use_qkv_bias=True, dtype="float32")
    assert ModelConfig.from_hf(json.loads(json.dumps(stops.to_hf()))) == stops


def test_20_and_21_are_alike_and_22_routes_by_block():
    for size in ("mini", "flash"):
        assert ModelConfig.from_preset(f"llada2.0-{size}") == ModelConfig.from_preset(f"llada2.1-{size}")
        assert ModelConfig.from_preset(f"llada2.2-{size}").block_routing


def test_unknown_preset_lists_the_presets():
    with pytest.raises(ConfigError, match=r"unknown preset 'mini': the presets are llada2\.0-flash, "):
        ModelConfig.from_preset("mini")


@pytest.mark.parametrize(("make", "words"), [(os.mkfifo, "a named pipe"), (os.mkdir, "a folder")])
def test_a_config_that_is_no_regular_file_is_named(tmp_path, make, words):
    make(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=f"config.json cannot be read: it is {words}, not a regular file"):
        ModelConfig.from_hf(tmp_path)


def test_json_is_read_as_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "a.json").write_bytes('{"a": "größe"}'.encode())
    assert read_json_object(tmp_path / "a.json") == {"a": "größe"}
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"cannot be read as JSON: .*utf-8"):
        read_json_object(tmp_path / "a.json")
