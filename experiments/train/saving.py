"""The folder of a training run: what the run is, and its state for resuming.

    run.json          model, seed, recipe, data: two runs with the same are the same run
    state/<step>/     an Orbax checkpoint of the whole training state

Promises: a state has its name only when it is complete (Orbax writes elsewhere and renames), and the older ones are
removed only then; a run is resumed under the settings that it was started with or not at all.

Deliberately not here: the exported model (``export``).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from training import TrainState

from oled_jax.errors import OledError
from oled_jax.files import write_whole

RECORD = "run.json"
STATES = "state"


def open_run(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Starts a run in ``folder``, or checks that the one in it has these ``settings`` (JSON values).

    Raises OledError when a run is there and not to be resumed, or is another one.
    """
    settings = json.loads(json.dumps(settings))
    record = folder / RECORD
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(settings, indent=1) + "\n")
        return
    if not resume:
        raise OledError(f"{folder} holds a run: add --resume to go on with it, or name another folder")
    found = json.loads(record.read_text())
    differing = [key for key in sorted({*found, *settings}) if found.get(key) != settings.get(key)]
    if differing:
        shown = ", ".join(f"{key} was {found.get(key)!r:.100}, is {settings.get(key)!r:.100}" for key in differing)
        raise OledError(f"{folder} holds another run: {shown}")


def save(folder: Path, state: TrainState) -> None:
    """Saves ``state`` under its step and removes older ones; on the disk when this returns."""
    states = (folder / STATES).absolute()
    states.mkdir(exist_ok=True)
    step = int(state.step)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(states / f"{step:08d}", _tree(state), force=True)
    for older in states.iterdir():
        if older.name != f"{step:08d}":
            shutil.rmtree(older)


def restore(folder: Path, abstract: TrainState) -> TrainState | None:
    """The newest saved state, in the shapes of ``abstract`` (``jax.eval_shape``); None where there is none."""
    states = sorted(path for path in (folder / STATES).absolute().glob("*") if path.name.isdigit())
    if not states:
        return None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), _tree(abstract))
    with ocp.StandardCheckpointer() as checkpointer:
        return TrainState(**checkpointer.restore(states[-1], target))


def _tree(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "weights": state.weights, "bias": state.bias, "optimizer": state.optimizer}
