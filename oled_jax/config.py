"""What a LLaDA2.x model is: a frozen ``ModelConfig``, read from a published ``config.json`` or a TOML preset.

Promises: every field that the computation reads is here, under its published name; a required key that is missing and
a value that this package does not implement are errors, all of them reported at once. Nothing defaults silently to
what the reference class happens to default to (its defaults are not the values of any released model).

Deliberately not here: decoding arguments (``oled_jax.decoding``) and placement of experts (``oled_jax.offload``).
"""

import dataclasses
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from oled_jax.arguments import is_int, is_number
from oled_jax.errors import ConfigError, problem_list
from oled_jax.files import read_bytes

MODEL_TYPES = ("llada2_moe", "llada2_moe_veomni")

# No size or constant of a model is anywhere near; NaN and infinity, which JSON readers accept, fail the comparison too.
_ABSURD = 1e12

# Keys without which a config does not describe a model. `rope_theta` is looked for in `rope_parameters` as well.
_REQUIRED_INTS = (
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
)
_REQUIRED_FLOATS = ("rms_norm_eps",)

# The released models all carry these values, and the computation is fixed to them.
_FIXED = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "use_rmsnorm": True,
    "norm_head": False,
    "norm_softmax": False,
    "using_split_qkv_in_self_attention": False,
    "use_sliding_window": False,
    "moe_router_enable_expert_bias": True,
}

_SPECIAL_IDS = ("pad_token_id", "eos_token_id", "mask_token_id", "delete_token_id", "split_token_id")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry and constants of one LLaDA2.x model, under the names of the published ``config.json``.

    ``expert_capacity > 0`` selects LLaDA2.2's block routing over windows of ``block_size`` tokens; otherwise routing is
    limited to ``topk_group`` of ``n_group`` groups (LLaDA2.0 and 2.1). ``dtype`` is what the config announces
    ("bfloat16" or "float32"); a checkpoint's tensors decide what is loaded.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    partial_rotary_factor: float = 0.5
    expert_capacity: int = 0
    block_size: int = 0
    use_qkv_bias: bool = False
    use_bias: bool = False
    dtype: str = "bfloat16"
    pad_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    mask_token_id: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    def __post_init__(self):
        problems = _inconsistencies(self)
        if problems:
            raise ConfigError(problem_list("model config", problems))

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose feed-forward part is a mixture of experts."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @property
    def block_routing(self) -> bool:
        """True for LLaDA2.2's routing, which limits each window of ``block_size`` tokens to ``expert_capacity``."""
        return self.expert_capacity > 0

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any]) -> "ModelConfig":
        """Reads a published ``config.json``: a path to the file or to its folder, or the decoded dictionary.

        Raises ConfigError for a file that is absent or no JSON object, another model type, missing required keys and
        values that are not implemented; every such problem is in the one message.
        """
        if isinstance(source, dict):
            return cls._from_published(source, "config")
        if not isinstance(source, str | Path):
            raise ConfigError(f"source is {source!r}: give a path or a decoded config.json")
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        return cls._from_published(read_json_object(path), str(path))

    @classmethod
    def from_preset(cls, name: str) -> "ModelConfig":
        """Reads one of the presets that ship with the package, such as "llada2.0-mini" (see ``preset_names``)."""
        names = preset_names()
        if name not in names:
            raise ConfigError(f"unknown preset {name!r}: the presets are {', '.join(names)}")
        text = (resources.files("oled_jax.configs") / f"{name}.toml").read_text()
        return cls._from_published(tomllib.loads(text)["model"], f"preset {name}")

    @classmethod
    def _from_published(cls, raw: dict[str, Any], where: str) -> "ModelConfig":
        problems = []
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"{where}: model_type is {model_type!r}; this package runs LLaDA2.x checkpoints "
                f"({', '.join(MODEL_TYPES)})"
            )
        values: dict[str, Any] = {}
        for key in _REQUIRED_INTS:
            values[key] = _number(raw, key, int, problems)
        for key in _REQUIRED_FLOATS:
            values[key] = _number(raw, key, float, problems)
        _check_rope(raw, problems)
        nested = raw.get("rope_parameters")
        rope = {**raw, **{k: v for k, v in nested.items() if v is not None}} if isinstance(nested, dict) else raw
        values["rope_theta"] = _number(rope, "rope_theta", float, problems)
        if rope.get("partial_rotary_factor") is not None:
            values["partial_rotary_factor"] = _number(rope, "partial_rotary_factor", float, problems)
        for key, fixed in _FIXED.items():
            if raw.get(key, fixed) != fixed:
                problems.append(f"{key} is {raw[key]!r}, and only {fixed!r} is implemented")
        for key in ("n_group", "topk_group", "expert_capacity", "block_size"):
            if raw.get(key) is not None:
                values[key] = _number(raw, key, int, problems)
        if raw.get("routed_scaling_factor") is not None:
            values["routed_scaling_factor"] = _number(raw, "routed_scaling_factor", float, problems)
        values["use_qkv_bias"] = bool(raw.get("use_qkv_bias", False))
        values["use_bias"] = bool(raw.get("use_bias", False))
        values["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        for key in _SPECIAL_IDS:
            value = raw.get(key)
            values[key] = tuple(value) if isinstance(value, list) else value
        if raw.get("head_dim") is not None:
            values["head_dim"] = _number(raw, "head_dim", int, problems)
        elif values["hidden_size"] and values["num_attention_heads"]:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        if problems:
            raise ConfigError(problem_list(where, problems))
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The published form of this config, as ``from_hf`` reads it; optional keys only where they are set."""
        raw = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not self.block_routing:
            del raw["expert_capacity"], raw["block_size"]
        raw = {key: list(value) if isinstance(value, tuple) else value for key, value in raw.items()}
        raw = {key: value for key, value in raw.items() if value is not None}
        constants = {"rotary_dim": self.rotary_dim, "rope_scaling": None, "router_dtype": "fp32", "use_qk_norm": True}
        return {
            "architectures": ["LLaDA2MoeModelLM"],
            "model_type": MODEL_TYPES[0],
            **raw,
            **constants,
            **_FIXED,
        }


def preset_names() -> tuple[str, ...]:
    """Names of the TOML presets that ship with the package, sorted."""
    files = resources.files("oled_jax.configs").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from ``path``; ConfigError when it is absent, no regular file or not one."""
    try:
        raw = json.loads(read_bytes(path).decode())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: a checkpoint folder in the published layout holds one") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: bad text, bad JSON, numbers of absurd length
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}, expected a JSON object")
    return raw


def _number(raw: dict[str, Any], key: str, kind: type, problems: list[str]):
    value = raw.get(key)
    if value is None:
        problems.append(f"{key} is missing")
        return None
    if not (is_int(value) if kind is int else is_number(value)):
        problems.append(f"{key} is {value!r}, expected {'an integer' if kind is int else 'a number'}")
        return None
    if not abs(value) < _ABSURD:  # false for NaN as well
        problems.append(f"{key} is out of all range, expected a finite number below {_ABSURD:.0e}")
        return None
    return kind(value)


def _check_rope(raw: dict[str, Any], problems: list[str]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is None:
            continue
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, dict) else value
        if kind != "default":
            problems.append(f"{key} asks for {kind!r}, and rope scaling is not implemented")


def _inconsistencies(config: ModelConfig) -> list[str]:
    """What does not hold together in a config, as sentences."""
    c = config
    problems = []
    positive = [k for k in _REQUIRED_INTS if k not in ("first_k_dense_replace", "num_shared_experts")] + ["head_dim"]
    for key in (*positive, "rms_norm_eps", "rope_theta"):
        if getattr(c, key) <= 0:
            problems.append(f"{key} is {getattr(c, key)}, must be positive")
    if problems:
        return problems
    if c.num_experts > 2**16 or c.num_hidden_layers > 2**12:
        return [f"num_experts {c.num_experts} and num_hidden_layers {c.num_hidden_layers} are beyond any such model"]
    if c.first_k_dense_replace == c.num_hidden_layers:
        problems.append(
            f"first_k_dense_replace is {c.first_k_dense_replace} of {c.num_hidden_layers} (num_hidden_layers), which "
            f"leaves no mixture-of-experts layer; this package runs models that have one"
        )
    elif not 0 <= c.first_k_dense_replace < c.num_hidden_layers:
        problems.append(f"first_k_dense_replace is {c.first_k_dense_replace}, must be 0 to {c.num_hidden_layers - 1}")
    if c.num_shared_experts < 0:
        problems.append(f"num_shared_experts is {c.num_shared_experts}, must not be negative")
    if c.num_attention_heads % c.num_key_value_heads:
        problems.append(
            f"num_attention_heads {c.num_attention_heads} is no multiple of num_key_value_heads {c.num_key_value_heads}"
        )
    if not 0 < c.partial_rotary_factor <= 1 or c.rotary_dim % 2:
        problems.append(f"partial_rotary_factor {c.partial_rotary_factor} gives {c.rotary_dim} rotating dimensions")
    if c.dtype not in ("bfloat16", "float32"):
        problems.append(f"dtype is {c.dtype!r}, and only bfloat16 and float32 are implemented")
    if c.expert_capacity < 0:
        problems.append(f"expert_capacity is {c.expert_capacity}, must not be negative")
    if c.block_routing:
        if c.block_size <= 0:
            problems.append(f"expert_capacity is {c.expert_capacity}, which needs a positive block_size")
        if not c.num_experts_per_tok <= c.expert_capacity <= c.num_experts:
            problems.append(
                f"expert_capacity is {c.expert_capacity}, must be {c.num_experts_per_tok} (num_experts_per_tok) to "
                f"{c.num_experts} (num_experts)"
            )
    elif c.n_group <= 0 or c.num_experts % c.n_group or c.num_experts // c.n_group < 2:
        problems.append(f"num_experts {c.num_experts} does not split into n_group {c.n_group} groups of at least two")
    elif not 0 < c.topk_group <= c.n_group:
        problems.append(f"topk_group is {c.topk_group}, must be 1 to {c.n_group} (n_group)")
    elif c.num_experts_per_tok > c.topk_group * (c.num_experts // c.n_group):
        problems.append(
            f"num_experts_per_tok {c.num_experts_per_tok} exceeds the {c.topk_group * (c.num_experts // c.n_group)} "
            f"experts of topk_group {c.topk_group} groups"
        )
    return problems
