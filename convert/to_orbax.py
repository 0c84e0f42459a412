"""Published layout to the converted folder: one Orbax checkpoint per unit, streamed.

Promises: memory for about three units beyond what Orbax needs to save one (about three copies of it), whatever the
size of the model; units that an earlier run finished are neither read nor written again.
"""

from pathlib import Path

from oled_jax.checkpoint import Checkpoint, Progress, stream
from oled_jax.checkpoint.orbax_format import FILES_PER_UNIT, UnitStore, recorded_units, write_manifest
from oled_jax.convert.staging import Staging
from oled_jax.errors import CheckpointError


def to_orbax(source: Checkpoint, destination: Path, progress: Progress | None = None) -> None:
    """Writes ``source`` (published layout) as a converted folder; resumes an unfinished conversion.

    Raises CheckpointError when the destination exists, belongs to other work or does not fit on the disk.
    """
    if source.format == "orbax":
        raise CheckpointError(f"{source.path} is converted already: copy the folder, or use to-hf for the way back")
    with Staging(source, destination, "to-orbax", {}) as staging:
        store = UnitStore(staging.work, recorded_units(staging.work))
        try:
            store.remove_leftovers()
            finished = store.finished(source.units())
            todo = [unit for unit in source.units() if unit.name not in finished]
            staging.check_space(sum(unit.nbytes for unit in todo), FILES_PER_UNIT * len(todo))
            for unit, arrays in stream(source, progress, units=todo):
                store.save(unit, arrays)
            staging.copy_companions()
            write_manifest(staging.work, source, store)
        finally:
            store.close()
        staging.finish()
