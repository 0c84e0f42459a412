"""The models that are trained here and how: frozen dataclasses, one ``Preset`` per model.

Promises: a preset and a seed determine a training run, batch by batch. Special ids are those of the tokenizer and are
filled in when it is known.

Deliberately not here: the tasks and the tokenizer.
"""

import dataclasses

from oled_jax.config import ModelConfig
from oled_jax.errors import OledError

BLOCK = 32  # tokens of a block, in training and in decoding
LENGTH = 256  # positions of a row of a batch


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    ``batch``: rows of a step; a row is run twice (clean and noised), so a step has ``2 * LENGTH * batch`` positions.
    ``steps``: where the learning rate, which rises over ``warm_up`` steps, has fallen to zero (linearly).
    ``noise``: range of a block's mask ratio. ``sharpening``: weight of the entropy of the predictions that are right,
    from the share ``sharpening_from`` of the steps on (see ``objective``). ``bias_step``: what a step moves the
    routers' selection biases by, ``late_bias_step`` from the share ``late_from`` on. ``experts``: "dense" computes all
    experts for all tokens, "gathered" at most ``capacity`` times an expert's even share of tokens. ``embedding``: the
    token table's gradient by a "matmul" with one-hot rows or by "scatter". ``dtype``: of all computation but the
    routers, the loss and the optimizer, which are float32, as the master weights are.
    """

    batch: int
    steps: int
    peak_rate: float
    warm_up: int = 200
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    clip: float = 1.0
    noise: tuple[float, float] = (0.05, 1.0)
    sharpening: float = 0.3
    sharpening_from: float = 0.6
    bias_step: float = 0.002
    late_bias_step: float = 0.0002
    late_from: float = 0.8
    experts: str = "dense"
    capacity: float = 1.5
    embedding: str = "matmul"
    dtype: str = "bfloat16"

    def __post_init__(self):
        for name, choices in (
            ("experts", ("dense", "gathered")),
            ("embedding", ("matmul", "scatter")),
            ("dtype", ("bfloat16", "float32")),
        ):
            if getattr(self, name) not in choices:
                raise OledError(f"{name} is {getattr(self, name)!r}: give {' or '.join(choices)}")
        for name, least in (("batch", 1), ("steps", 1), ("sharpening", 0), ("capacity", 0), ("peak_rate", 0)):
            if not getattr(self, name) >= least:  # false for NaN as well
                raise OledError(f"{name} is {getattr(self, name)}: give at least {least}")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model's geometry and its recipe."""

    name: str
    config: ModelConfig
    recipe: Recipe


_COMMON = {
    "vocab_size": 1024,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    # The released 600,000 is made for 32,768 positions; with 8 frequencies most would not turn within 256.
    "rope_theta": 10000.0,
    "head_dim": 32,
}

# The checkpoint that ships: its bfloat16 tensors, their names and the tokenizer together stay below 16 MB.
DEMO = Preset(
    "demo",
    ModelConfig(
        hidden_size=192,
        num_hidden_layers=8,
        intermediate_size=384,
        moe_intermediate_size=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_experts=64,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=4,
        **_COMMON,
    ),
    Recipe(batch=64, steps=12_500, peak_rate=2e-3),
)

# LLaDA2.0-mini's routing, and nothing else of its size: 20 layers, 256 experts in 8 groups, 8 chosen from 4 of them.
ROUTING = Preset(
    "routing",
    ModelConfig(
        hidden_size=256,
        num_hidden_layers=20,
        intermediate_size=640,
        moe_intermediate_size=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        **_COMMON,
    ),
    Recipe(batch=64, steps=10_000, peak_rate=1.2e-3),
)

# Small enough to learn the easiest task on a CPU in minutes: what shows that the chain of programs is whole.
TINY = Preset(
    "tiny",
    ModelConfig(
        hidden_size=64,
        num_hidden_layers=3,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        **{**_COMMON, "head_dim": 16, "vocab_size": 512},
    ),
    Recipe(batch=4, steps=1500, peak_rate=4e-3, warm_up=50, dtype="float32"),
)

PRESETS = {preset.name: preset for preset in (DEMO, ROUTING, TINY)}
