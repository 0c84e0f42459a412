"""oled-jax: mixture-of-experts diffusion language models (LLaDA2.x) in JAX, with experts that need not fit the device.

Names are imported on first use, so that importing the package starts no backend and parts that need only numpy stay
light.
"""

from importlib import import_module
from typing import Any

from oled_jax.version import __version__

_EXPORTS = {
    "BlockEvent": "oled_jax.decoding.loop",
    "Editing": "oled_jax.decoding.editing",
    "Engine": "oled_jax.engine",
    "Generation": "oled_jax.decoding.loop",
    "GenerationMetrics": "oled_jax.metrics",
    "Levenshtein": "oled_jax.decoding.levenshtein",
    "ModelConfig": "oled_jax.config",
    "OledError": "oled_jax.errors",
    "StepEvent": "oled_jax.decoding.loop",
    "Threshold": "oled_jax.decoding.threshold",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
