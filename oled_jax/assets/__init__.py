"""The checkpoint that ships with the package, and the name that stands for it.

``demo`` is a small LLaDA2 model trained by ``experiments/train`` (its model card is demo/README.md), in the published
layout: every command and ``Engine.load`` take it where they take a folder. A folder of that name is ``./demo``.
"""

from pathlib import Path
from typing import Any

DEMO = "demo"


def model_folder(model: Any) -> Any:
    """The folder of the embedded checkpoint for its name ``demo``; anything else as it is."""
    return str(Path(__file__).parent / DEMO) if isinstance(model, str) and model == DEMO else model
