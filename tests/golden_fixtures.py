"""Access to the golden fixtures (tests/golden/README.md) for tests of every room."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from oled_jax import Editing, Engine, Levenshtein, Threshold
from oled_jax.checkpoint import open_checkpoint
from oled_jax.loading import load_weights
from oled_jax.model.transformer import Experts
from oled_jax.offload.offloaded import OffloadedExperts
from oled_jax.offload.resident import ResidentExperts
from oled_jax.retention import RetentionPolicy
from oled_jax.retention.manager import RetentionManager

GOLDEN = Path(__file__).parent / "golden"
FLOAT32 = ("llada2-tiny-f32", "llada2-tiny-wide-f32", "llada2-tiny-qkvbias-f32", "llada22-tiny-f32")
BFLOAT16 = "llada2-tiny-bf16-sharded"
RULES = {"generate": Threshold, "generate_editing": Editing, "generate_levenshtein": Levenshtein}
CONTEXT = 128


@functools.cache
def engine(name: str) -> Engine:
    """The engine of one fixture folder, loaded (and its programs compiled) once for all tests."""
    return Engine.load(GOLDEN / name, context_length=CONTEXT)


def forward(name: str) -> dict[str, np.ndarray]:
    """The arrays of ``forward.npz``."""
    with np.load(GOLDEN / name / "forward.npz") as arrays:
        return dict(arrays)


def cases(name: str) -> list[tuple[str, int, dict]]:
    """Every recorded generation of a folder: (which file, index in it, the case)."""
    found = []
    for kind in RULES:
        path = GOLDEN / name / f"{kind}.json"
        if path.exists():
            found += [(kind, index, case) for index, case in enumerate(json.loads(path.read_text()))]
    return found


def resident_seam(experts, tokens) -> Experts:
    """All experts resident, and nothing known of ``tokens [B, T]``: what a bare forward needs across the seam."""
    runner = ResidentExperts()
    nothing = jnp.zeros(tokens.shape, jnp.int32)
    return Experts(runner, *runner.init(experts), nothing.astype(jnp.float32), nothing)


def rule_of(kind: str, case: dict):
    """The decoding rule that a recorded case was made with."""
    outcome = ("prompt_ids", "output_ids", "num_forwards", "gen_length")
    return RULES[kind](**{key: value for key, value in case.items() if key not in outcome})


@functools.cache
def banked(name: str) -> tuple:
    """Model and experts of one fixture folder, the experts in pinned host memory."""
    with open_checkpoint(GOLDEN / name) as checkpoint:
        return load_weights(checkpoint, checkpoint.weight_dtype, bank=True)


def offloaded_engine(
    name: str, capacity: int, policy: RetentionPolicy, form: str, *, staging: int = 2, host: bool = False
) -> Engine:
    """A new engine of one fixture folder with ``capacity`` slots per layer; ``host``: the manager decides."""
    model, experts = banked(name)
    config = model.config
    runner = OffloadedExperts(config.num_experts, capacity, policy, staging, form, observes=not host)
    manager = functools.partial(RetentionManager, runner.policy, len(config.moe_layers), config.num_experts, capacity)
    options = {"path": GOLDEN / name, "context_length": CONTEXT, "new_manager": manager if host else None}
    return Engine(model, experts, runner=runner, **options)
