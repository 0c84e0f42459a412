"""Checkpoints: ``open_checkpoint`` recognises a folder by its content, ``stream`` reads all of it unit by unit.

Two formats: the published Hugging Face layout (``huggingface``) and the converted one (``orbax_format``). ``layout``
says what a model's checkpoint holds; both formats are read into the same units.
"""

from pathlib import Path

from oled_jax.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE, HuggingFaceCheckpoint
from oled_jax.checkpoint.orbax_format import MANIFEST, OrbaxCheckpoint
from oled_jax.checkpoint.reading import Checkpoint, Progress, stream
from oled_jax.config import ModelConfig
from oled_jax.errors import CheckpointError
from oled_jax.files import checked_path

__all__ = ["PARTIAL_RECORD", "PARTIAL_SUFFIX", "Checkpoint", "Progress", "open_checkpoint", "stream"]

# A conversion works in a folder of this suffix, and keeps what it needs for resuming in this file there.
PARTIAL_SUFFIX = ".partial"
PARTIAL_RECORD = "oled_conversion.json"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint folder of either format and checks all of it but the data.

    Raises ConfigError for a config.json that does not describe a model of this package, and CheckpointError for
    everything else: no folder, neither format, an unfinished conversion, and names, shapes, dtypes or files that are
    not what the config asks for (all of them in one message).
    """
    path = checked_path(path)
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise CheckpointError(f"{path!s:.200} cannot be opened: {error.strerror}") from None
    if not exists:
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        if partial.is_dir():
            raise CheckpointError(f"{path} does not exist, but {partial.name} does: {_UNFINISHED}")
        raise CheckpointError(f"{path} does not exist: give the folder of a checkpoint (nothing is downloaded)")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: give the folder that holds it and config.json")
    if path.name.endswith(PARTIAL_SUFFIX) and (path / PARTIAL_RECORD).exists():
        raise CheckpointError(f"{path} cannot be used: {_UNFINISHED}")
    config = ModelConfig.from_hf(path)
    if (path / MANIFEST).exists():
        return OrbaxCheckpoint(path, config)
    if (path / INDEX_FILE).exists() or (path / SINGLE_FILE).exists():
        return HuggingFaceCheckpoint(path, config)
    raise CheckpointError(f"{path} holds no checkpoint: {_what_is_there(path)}")


_UNFINISHED = "it is an unfinished conversion; run the same oled-convert command again to finish it"


def _what_is_there(path: Path) -> str:
    if (path / PARTIAL_RECORD).exists():
        return _UNFINISHED
    if any(path.glob("*.safetensors")):
        return f"it has *.safetensors files, but neither {SINGLE_FILE} nor {INDEX_FILE}; download the index as well"
    if any(path.glob("*.bin")):
        return "it has *.bin files, and only safetensors are read"
    return f"expected {SINGLE_FILE}, {INDEX_FILE} or, after oled-convert to-orbax, {MANIFEST}"
