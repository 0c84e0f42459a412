"""Small random traces: experts that stay more often than not, blocks that end, batches one after another."""

import numpy as np
from hypothesis import strategies as st

from oled_jax.lab import Trace
from oled_jax.lab.trace import PADDING

LAYERS, EXPERTS, TOKENS, CHOSEN = 2, 8, 3, 2


def arrays(seed: int, forwards: int, *, batch: int = 2, prefill: bool = False, layers=LAYERS, experts=EXPERTS) -> dict:
    """The arrays of a trace of ``forwards`` forwards. With ``prefill``, a forward of it begins every batch, with two
    rows per sequence; a batch ends now and then, and one sequence of it before the others."""
    rng = np.random.default_rng(seed)
    rows, first, left = [], 0, 0
    for index in range(forwards):
        if left == 0:
            first, left, place = first + batch, int(rng.integers(2, 6)), np.zeros((batch, 2), int)
            ids = choose(rng, (batch, layers, TOKENS), experts)
            starting = prefill
        present = range(batch) if left > 1 or batch == 1 else range(1)
        ids = np.where(rng.random((batch, layers, TOKENS, 1)) < 0.5, choose(rng, (batch, layers, TOKENS), experts), ids)
        for s in present:
            for piece in range(2 if starting else 1):
                own = choose(rng, (layers, TOKENS), experts) if starting else ids[s]
                counted = np.arange(TOKENS) < (rng.integers(1, TOKENS + 1) if piece or rng.random() < 0.2 else TOKENS)
                rows.append(
                    {
                        "expert_ids": np.where(counted[:, None], own, PADDING).astype(np.uint16),
                        "weights": rng.random((layers, TOKENS, CHOSEN)).astype(np.float16),
                        "confidence": rng.random(TOKENS).astype(np.float16),
                        "tokens": rng.integers(0, 5, TOKENS).astype(np.int32),
                        "status": rng.integers(0, 4, TOKENS).astype(np.uint8),
                        "candidates": rng.integers(-1, 5, TOKENS).astype(np.int32),
                        "sequence": np.int32(first + s),
                        "block": np.int32(piece if starting else 2 + place[s, 0]),
                        "step": np.int32(0 if starting else place[s, 1]),
                        "phase": np.uint8(0 if starting else rng.integers(1, 3)),
                        "forward": np.int32(3 + 2 * index),
                    }
                )
            place[s] = (place[s, 0] + 1, 0) if rng.random() < 0.3 else (place[s, 0], place[s, 1] + 1)
        if not starting:
            left -= 1
        starting = False
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def choose(rng, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """Distinct experts for every token, int ``[*shape, K]``."""
    return np.argsort(rng.random((*shape, experts)), axis=-1)[..., :CHOSEN]


def random_trace(seed: int, forwards: int, *, experts: int = EXPERTS, **options) -> Trace:
    """See ``arrays``."""
    return Trace(num_experts=experts, **arrays(seed, forwards, experts=experts, **options))


def demands(*forwards: tuple[int, ...], experts: int) -> Trace:
    """One layer, one sequence, one expert per token: each forward wants the experts listed (which may repeat)."""
    count, most = len(forwards), max(map(len, forwards))
    ids = np.full((count, 1, most, 1), PADDING, np.uint16)
    for index, wanted in enumerate(forwards):
        ids[index, 0, : len(wanted), 0] = wanted
    zeros = np.zeros(count, np.int32)
    return Trace(
        num_experts=experts,
        expert_ids=ids,
        weights=np.ones(ids.shape, np.float16),
        confidence=np.full((count, most), 0.5, np.float16),
        tokens=np.zeros((count, most), np.int32),
        status=np.zeros((count, most), np.uint8),
        sequence=zeros,
        block=zeros,
        step=np.arange(count, dtype=np.int32),
        phase=np.ones(count, np.uint8),
        forward=np.arange(count, dtype=np.int32),
    )


@st.composite
def traces(draw, most: int = 14, **options):
    """Traces of one or two sequences."""
    seed, forwards = draw(st.integers(0, 2**31)), draw(st.integers(2, most))
    return random_trace(seed, forwards, batch=draw(st.integers(1, 2)), **options)
