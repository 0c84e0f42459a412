"""The training step: one jitted, donated program, and the state that it carries.

Promises: the state after a number of steps depends on preset, seed and batches only. A step's randomness comes from
seed and step number, so that a resumed run is the uninterrupted one, bit for bit on one machine.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from forward import Weights, check_config
from objective import Sums, objective
from presets import Preset
from routing import balanced

from oled_jax.checkpoint import layout
from oled_jax.config import ModelConfig
from oled_jax.model.numerics import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """``step`` int32 ``[]``: steps done; ``weights`` float32 by name; ``bias [L, E]`` float32 of the MoE layers'
    routers; ``optimizer``: optax's state."""

    step: Array
    weights: Weights
    bias: Array
    optimizer: Any


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of everything that gradients change, in the engine's terms."""
    shapes = {**layout.dense_shapes(config), **layout.expert_shapes(config)}
    return {name: shape for name, shape in shapes.items() if not name.endswith(".expert_bias")}


def initial_state(preset: Preset, seed: int) -> TrainState:
    """The state before the first step; an array's values depend on the seed and its name."""
    depth = 2 * preset.config.num_hidden_layers
    weights = {}
    for name, shape in weight_shapes(preset.config).items():
        # Drawn by numpy: hundreds of random arrays in one program would take longer to compile than to make.
        draws = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
        weights[name] = jnp.asarray(_scaled(name, draws, depth))
    return _with_weights(preset, weights)


def abstract_state(preset: Preset) -> TrainState:
    """Shapes and dtypes of the state."""
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weight_shapes(preset.config).items()}
    return jax.eval_shape(functools.partial(_with_weights, preset), weights)


def _with_weights(preset: Preset, weights: Weights) -> TrainState:
    check_config(preset.config)
    bias = jnp.zeros((len(preset.config.moe_layers), preset.config.num_experts), jnp.float32)
    return TrainState(jnp.int32(0), weights, bias, optimizer(preset).init(weights))


def _scaled(name: str, draws: np.ndarray, depth: int) -> np.ndarray:
    """Standard normal ``draws`` at the scale of the array ``name``; norms begin at 1."""
    if name.endswith("norm.weight"):
        return np.ones_like(draws)
    if name == layout.EMBEDDING:
        return draws
    if name == layout.LM_HEAD:
        return np.float32(0.02) * draws
    inputs = draws.shape[-2] if name.endswith("experts.down") else draws.shape[-1]  # that one is transposed
    adds = name.endswith(("attention.dense.weight", "down_proj.weight", "experts.down"))  # to the residual stream
    return np.float32((inputs * (depth if adds else 1)) ** -0.5) * draws


def learning_rate(preset: Preset) -> optax.Schedule:
    """Linear up over ``warm_up`` steps, linear down to zero at ``steps``."""
    r = preset.recipe
    warm_up = min(r.warm_up, max(1, r.steps // 2))
    rise = optax.linear_schedule(0.0, r.peak_rate, warm_up)
    fall = optax.linear_schedule(r.peak_rate, 0.0, max(1, r.steps - warm_up))
    return optax.join_schedules([rise, fall], [warm_up])


def optimizer(preset: Preset) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm; vectors (norms) do not decay."""
    r = preset.recipe

    def matrices(weights: Weights) -> dict[str, bool]:
        return {name: array.ndim > 1 for name, array in weights.items()}

    adamw = optax.adamw(learning_rate(preset), *r.betas, weight_decay=r.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(r.clip), adamw)


def train_step(
    preset: Preset, kinds: int, state: TrainState, sums: Sums, batch, seed: Array
) -> tuple[TrainState, Sums, Array]:
    """One step on a ``Batch``: ``(state, sums, steps done)``, its sums added to ``sums``; to be jitted with the first
    two arguments bound. The number of steps is there a second time, for who waits for the step."""
    r = preset.recipe
    dtype = jnp.dtype(r.dtype)
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    sharpening = jnp.where(state.step >= r.sharpening_from * r.steps, r.sharpening, 0.0)

    def loss(weights: Weights) -> tuple[Array, Sums]:
        with jax.named_scope("cast"):
            used = {name: array.astype(dtype) for name, array in weights.items()}
        return objective(preset, used, state.bias, batch, key, sharpening, kinds)

    (_, of_batch), gradients = jax.value_and_grad(loss, has_aux=True)(state.weights)
    of_batch = of_batch._replace(gradient=optax.tree.norm(gradients))
    with jax.named_scope("optimizer"):
        changes, new_optimizer = optimizer(preset).update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, changes)
    bias_step = jnp.where(state.step >= r.late_from * r.steps, r.late_bias_step, r.bias_step)
    bias = balanced(state.bias, of_batch.load, bias_step)
    done = state.step + 1
    return TrainState(done, weights, bias, new_optimizer), jax.tree.map(jnp.add, sums, of_batch), done


def jitted_step(preset: Preset, kinds: int):
    """``train_step(state, sums, batch, seed)`` jitted; state and sums are donated.

    What comes back lies where it lay: on a GPU, results at changing addresses make XLA record its launches anew.
    """
    return jax.jit(functools.partial(train_step, preset, kinds), donate_argnums=(0, 1))


def jitted_evaluation(preset: Preset, kinds: int):
    """``(state, batch, seed) -> Sums`` of a batch without a change; the noise is that of ``seed``."""

    def evaluate(state: TrainState, batch, seed: Array) -> Sums:
        used = {name: array.astype(preset.recipe.dtype) for name, array in state.weights.items()}
        return objective(preset, used, state.bias, batch, jax.random.key(seed), jnp.float32(0), kinds)[1]

    return jax.jit(evaluate)


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    """How many numbers ``shapes`` hold."""
    return sum(math.prod(shape) for shape in shapes.values())
