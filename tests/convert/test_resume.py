"""What a conversion leaves when it is stopped, and what the next run makes of it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from unittest.mock import ANY

import orbax.checkpoint as ocp
import pytest

from oled_jax.checkpoint import orbax_format, safetensors_file
from oled_jax.checkpoint.orbax_format import UnitStore
from oled_jax.convert.staging import Staging

SHARDS = ("--max-shard-size", "200KB")


def snapshot(folder, pattern):
    """Inode and time of every finished file: what was not touched keeps both."""
    files = [p for p in folder.rglob(pattern) if p.is_file() and "tmp" not in p.as_posix().removeprefix(str(folder))]
    return {p.relative_to(folder): (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def fail_after(monkeypatch, owner, name, calls, error):
    """Lets ``calls`` calls of a method through and raises ``error`` from then on."""
    real, count = getattr(owner, name), [0]

    def method(*arguments, **options):
        count[0] += 1
        if count[0] > calls:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, method)


def one_line(err):
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    return lines[0]


def test_finished_units_survive_a_crash_untouched(published, tmp_path, command, monkeypatch):
    destination, partial = tmp_path / "converted", tmp_path / "converted.partial"
    with monkeypatch.context() as patch:
        fail_after(patch, UnitStore, "save", 3, RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            command("to-orbax", published, destination)
    assert not destination.exists()
    before = snapshot(partial, "units/*/**/*")
    assert len({path.parts[1] for path in before}) == 3

    saved = []
    real = UnitStore.save
    monkeypatch.setattr(
        UnitStore, "save", lambda self, unit, arrays: (saved.append(unit.name), real(self, unit, arrays))
    )
    assert command("to-orbax", published, destination)[0] == 0
    assert not partial.exists()
    assert len(saved) == 8 - 3
    after = snapshot(destination, "units/*/**/*")
    assert {path: after[path] for path in before} == before
    assert command("compare", published, destination)[0] == 0
    assert not (destination / "oled_conversion.json").exists()


def test_finished_shards_survive_a_crash_untouched(published, tmp_path, command, load, monkeypatch):
    destination, partial = tmp_path / "back", tmp_path / "back.partial"
    with monkeypatch.context() as patch:
        fail_after(patch, safetensors_file.SafetensorsWriter, "write", 110, RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            command("to-hf", published, destination, *SHARDS)
    before = snapshot(partial, "*.safetensors")
    assert 0 < len(before) < 5
    assert not list(partial.glob("*.tmp"))
    assert command("to-hf", published, destination, *SHARDS)[0] == 0
    after = snapshot(destination, "*.safetensors")
    assert {path: after[path] for path in before} == before
    assert load(destination) == load(published)


def cut_off(data, record):
    os.truncate(data, 100)


def flip_a_bit(data, record):
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def put_a_pipe_there(data, record):
    data.unlink()
    os.mkfifo(data)


def lose_the_record(data, record):
    record.unlink()


def cut_the_record(data, record):
    os.truncate(record, 30)


def record_other_arrays(data, record):
    """As left by a version that cuts units differently."""
    entry = json.loads(record.read_text())
    entry["arrays"][0]["start"] = 1
    record.write_text(json.dumps(entry))


DAMAGES = [cut_off, flip_a_bit, put_a_pipe_there, lose_the_record, cut_the_record, record_other_arrays]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_unit_that_lost_its_data_is_redone(published, tmp_path, command, monkeypatch, damage):
    """As after a loss of power: the unit's folder is there, part of its data or record is not."""
    destination, partial = tmp_path / "converted", tmp_path / "converted.partial"
    with monkeypatch.context() as patch:
        fail_after(patch, UnitStore, "save", 3, RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            command("to-orbax", published, destination)
    data = max((p for p in partial.rglob("units/*/**/*") if p.is_file()), key=lambda p: p.stat().st_size)
    unit = data.relative_to(partial / "units").parts[0]
    damage(data, partial / "unit_records" / f"{unit}.json")
    saved = []
    real = UnitStore.save
    with monkeypatch.context() as patch:
        # Orbax answers damage with tracebacks from threads that nobody can catch: it must not see any.
        fail_after(patch, ocp.StandardCheckpointer, "restore", 0, AssertionError("Orbax was asked"))
        patch.setattr(UnitStore, "save", lambda self, unit, arrays: (saved.append(unit.name), real(self, unit, arrays)))
        assert command("to-orbax", published, destination) == (0, ANY, "")
    assert unit in saved
    assert len(saved) == 8 - 2
    assert command("compare", published, destination)[0] == 0


def test_a_conversion_killed_at_its_very_end_redoes_nothing(published, tmp_path, command, monkeypatch):
    """The manifest is written and part of the records is gone, but the folder does not have its name yet."""
    destination, partial = tmp_path / "converted", tmp_path / "converted.partial"
    with monkeypatch.context() as patch:
        patch.setattr(UnitStore, "remove_records", lambda self: next(self._records.iterdir()).unlink())
        fail_after(patch, Staging, "finish", 0, RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            command("to-orbax", published, destination)
    assert (partial / "oled_checkpoint.json").exists()
    assert len(list((partial / "unit_records").iterdir())) == 7
    before = snapshot(partial, "units/*/**/*")
    assert command("to-orbax", published, destination)[0] == 0
    assert snapshot(destination, "units/*/**/*") == before
    assert not (destination / "unit_records").exists()
    assert command("compare", published, destination)[0] == 0


@pytest.mark.parametrize(("verb", "options"), [("to-orbax", ()), ("to-hf", SHARDS)])
def test_a_killed_process_resumes_to_an_equal_result(published, tmp_path, command, verb, options):
    destination, partial = tmp_path / "destination", tmp_path / "destination.partial"
    code = """
        import os, signal, sys
        from oled_jax.checkpoint import orbax_format, safetensors_file
        from oled_jax.convert.cli import main
        real_save, real_write, count = orbax_format.UnitStore.save, safetensors_file.SafetensorsWriter.write, [0]
        def save(self, unit, arrays):
            if sum(1 for _ in self._folder.glob("*")) == 3:
                (self._folder / (unit.name + ".orbax-checkpoint-tmp")).mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
            real_save(self, unit, arrays)
        def write(self, *arguments):
            count[0] += 1
            if count[0] == 110:
                os.kill(os.getpid(), signal.SIGKILL)
            real_write(self, *arguments)
        orbax_format.UnitStore.save, safetensors_file.SafetensorsWriter.write = save, write
        main(sys.argv[1:])
    """
    arguments = [verb, str(published), str(destination), *options]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, check=False, cwd=tmp_path
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not destination.exists()
    left = list(partial.rglob("*tmp"))
    assert len(left) == 1
    assert command(*arguments)[0] == 0
    assert not list(destination.rglob("*tmp"))
    assert command("compare", published, destination)[0] == 0


def test_a_signal_while_a_unit_is_being_saved_completes_the_unit(published, tmp_path, command):
    destination, partial = tmp_path / "converted", tmp_path / "converted.partial"
    code = """
        import os, signal, sys, time
        import orbax.checkpoint as ocp
        from oled_jax.convert.cli import main
        real, count = ocp.StandardCheckpointer.save, [0]
        def save(self, *arguments, **options):
            count[0] += 1
            if count[0] == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)  # the interrupt is raised meanwhile, here if this is the main thread
            real(self, *arguments, **options)
        ocp.StandardCheckpointer.save = save
        sys.exit(main(sys.argv[1:]))
    """
    arguments = ["to-orbax", str(published), str(destination)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in one_line(done.stderr)
    assert len(list((partial / "units").iterdir())) == 2
    assert not list(partial.rglob("*tmp*"))
    assert command(*arguments)[0] == 0
    assert command("compare", published, destination)[0] == 0


def interrupted(published, destination, command, monkeypatch, error, *options):
    with monkeypatch.context() as patch:
        fail_after(patch, UnitStore, "save", 2, error)
        return command("to-orbax", published, destination, *options)


def test_an_interrupt_is_one_line_and_resumable(published, tmp_path, command, monkeypatch):
    code, out, err = interrupted(published, tmp_path / "converted", command, monkeypatch, KeyboardInterrupt())
    assert (code, out) == (130, "")
    assert "interrupted" in one_line(err)
    assert "converted.partial" in one_line(err)
    assert command("to-orbax", published, tmp_path / "converted")[0] == 0


def test_a_full_disk_while_saving_units_is_one_line(published, tmp_path, command, monkeypatch):
    destination = tmp_path / "converted"
    # What orbax raises then; one unit is finished by that time.
    with monkeypatch.context() as patch:
        error = ValueError("RESOURCE_EXHAUSTED: Failed to write 44122112 bytes to file 4: No space left on device")
        fail_after(patch, ocp.StandardCheckpointer, "save", 1, error)
        patch.setattr(orbax_format, "_SECONDS_TO_SETTLE", 0)
        code, out, err = command("to-orbax", published, destination)
    assert (code, out) == (2, "")
    assert "the disk is full" in one_line(err)
    assert "converted.partial" in one_line(err)
    assert not destination.exists()
    assert command("to-orbax", published, destination)[0] == 0
    assert command("compare", published, destination)[0] == 0


@pytest.mark.parametrize("call", ["pwrite", "replace"])
def test_a_full_disk_while_writing_shards_is_one_line(published, tmp_path, command, monkeypatch, call):
    destination = tmp_path / "back"
    with monkeypatch.context() as patch:
        fail_after(patch, os, call, 2 if call == "replace" else 90, OSError(errno.ENOSPC, "No space left on device"))
        code, out, err = command("to-hf", published, destination, *SHARDS)
    assert (code, out) == (2, "")
    assert "the disk is full" in one_line(err)
    assert not destination.exists()
    assert command("to-hf", published, destination, *SHARDS)[0] == 0
    assert command("compare", published, destination)[0] == 0


@pytest.mark.parametrize("verb", ["to-orbax", "to-hf"])
def test_too_little_space_is_told_before_anything_is_written(published, tmp_path, command, monkeypatch, verb):
    usage = shutil.disk_usage(tmp_path)._replace(free=500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    before = sorted(tmp_path.iterdir())
    code, _, err = command(verb, published, tmp_path / "destination")
    assert code == 2
    companions = sum(
        p.stat().st_size for p in published.iterdir() if "safetensors" not in p.name and p.suffix != ".npz"
    )
    companions -= (published / "generate.json").stat().st_size
    assert f"{851_520 + companions:,} bytes are needed and 500,000 available" in one_line(err)
    assert sorted(tmp_path.iterdir()) == before


def test_too_few_inodes_are_told_before_anything_is_written(published, tmp_path, command, monkeypatch):
    """Tensorstore reports it one file at a time, and Orbax waits for minutes where a folder cannot be made."""

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=1000, f_favail=100))
    before = sorted(tmp_path.iterdir())
    code, _, err = command("to-orbax", published, tmp_path / "destination")
    assert code == 2
    assert "files (inodes) are needed and 100 available" in one_line(err)
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_others_fill_meanwhile_is_one_line(published, tmp_path, command, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    free = iter([10**9] * 3)

    def disk_usage(_):
        return usage._replace(free=next(free, 1000))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", disk_usage)
        code, out, err = command("to-orbax", published, tmp_path / "converted")
    assert (code, out) == (2, "")
    assert "the disk is full" in one_line(err)
    assert len(list((tmp_path / "converted.partial" / "units").iterdir())) == 2
    assert command("to-orbax", published, tmp_path / "converted")[0] == 0
    assert command("compare", published, tmp_path / "converted")[0] == 0


def test_resuming_needs_space_for_the_rest_only(published, tmp_path, command, monkeypatch):
    interrupted(published, tmp_path / "converted", command, monkeypatch, KeyboardInterrupt())
    usage = shutil.disk_usage(tmp_path)._replace(free=800_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert command("to-orbax", published, tmp_path / "converted")[0] == 0


def test_a_changed_source_is_not_mixed_with_old_work(published, tmp_path, command, monkeypatch):
    interrupted(published, tmp_path / "converted", command, monkeypatch, KeyboardInterrupt())
    shard = published / "model-00001-of-00003.safetensors"
    os.utime(shard, ns=(1, 1))
    code, _, err = command("to-orbax", published, tmp_path / "converted")
    assert code == 2
    assert "converted.partial is an unfinished conversion with a source that was different: " in one_line(err)
    assert "delete it" in err
    shutil.rmtree(tmp_path / "converted.partial")
    assert command("to-orbax", published, tmp_path / "converted")[0] == 0


def test_other_settings_are_not_mixed_with_old_work(published, tmp_path, command, monkeypatch):
    interrupted(published, tmp_path / "converted", command, monkeypatch, KeyboardInterrupt())
    code, _, err = command("to-hf", published, tmp_path / "converted")
    assert code == 2
    assert "with another command and other settings: delete it" in one_line(err)


def test_a_shard_that_is_not_the_planned_one_is_written_anew(published, tmp_path, command, load, monkeypatch):
    with monkeypatch.context() as patch:
        fail_after(patch, safetensors_file.SafetensorsWriter, "write", 110, KeyboardInterrupt())
        assert command("to-hf", published, tmp_path / "back", *SHARDS)[0] == 130
    first = sorted((tmp_path / "back.partial").glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-5])
    assert command("to-hf", published, tmp_path / "back", *SHARDS)[0] == 0
    assert load(tmp_path / "back") == load(published)
