"""Access to the golden fixtures (tests/golden/README.md) for tests of every room."""

import functools
import json
from pathlib import Path

import numpy as np

from oled_jax import Editing, Engine, Levenshtein, Threshold

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


def rule_of(kind: str, case: dict):
    """The decoding rule that a recorded case was made with."""
    outcome = ("prompt_ids", "output_ids", "num_forwards", "gen_length")
    return RULES[kind](**{key: value for key, value in case.items() if key not in outcome})
