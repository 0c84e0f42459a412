"""Measures a conversion there and back: speed, peak memory, and what a kill in the middle leaves.

    python experiments/bench_convert.py CHECKPOINT [--work FOLDER]

Each conversion runs in a process of its own, whose peak resident memory the system reports when it ends. Then both
directions are killed (SIGKILL) once half of the bytes are there, resumed, and compared with the source bit for bit.
Needs free space for twice the checkpoint below ``--work``. Exit code 1 if any comparison finds a difference.

Deliberately not measured: a cold page cache, which needs rights that a benchmark should not ask for.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oled_jax.checkpoint import PARTIAL_SUFFIX, open_checkpoint

COMMAND = (sys.executable, "-m", "oled_jax.convert")


def main() -> int:
    """Runs all measurements and prints one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder in the published layout")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where to put the results")
    arguments = parser.parse_args()
    with open_checkpoint(arguments.checkpoint) as checkpoint:
        total = checkpoint.total_bytes
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-convert-", dir=arguments.work))
    equal = True
    try:
        converted, back = folder / "orbax", folder / "hf"
        report("to-orbax", total, run("to-orbax", arguments.checkpoint, converted))
        report("to-hf", total, run("to-hf", converted, back, "--max-shard-size", "1GB"))
        equal &= compare(arguments.checkpoint, back)
        for command, source, destination in (
            ("to-hf", converted, back),
            ("to-orbax", arguments.checkpoint, converted),
        ):
            shutil.rmtree(destination)
            options = ("--max-shard-size", "1GB") if command == "to-hf" else ()
            kept = run_and_kill(command, source, destination, *options, at_bytes=total // 2)
            report(f"{command} resumed", total - kept, run(command, source, destination, *options), kept_bytes=kept)
            equal &= compare(arguments.checkpoint, destination)
    finally:
        shutil.rmtree(folder)
    return 0 if equal else 1


def run(*arguments: str | Path) -> tuple[float, float]:
    """Runs one command to its end; returns seconds and the peak resident memory of its process in bytes."""
    start = time.monotonic()
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL)
    # wait4 reports this child alone; RUSAGE_CHILDREN would be the largest child so far.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed with exit code {process.returncode}")
    scale = 1 if sys.platform == "darwin" else 1024
    return time.monotonic() - start, usage.ru_maxrss * scale


def run_and_kill(*arguments: str | Path, at_bytes: int) -> int:
    """Runs a conversion, kills it when that many bytes are written, and returns how many are in finished files."""
    partial = Path(f"{arguments[2]}{PARTIAL_SUFFIX}")
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and written(partial, finished=False) < at_bytes:
            time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit("the conversion ended before it could be killed: use a larger checkpoint")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return written(partial, finished=True)


def written(folder: Path, *, finished: bool) -> int:
    """Bytes of the files below ``folder``, or only of those that a resumed run keeps."""
    size = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are renamed meanwhile
        for file in (Path(parent, name) for name in names):
            if finished and any("tmp" in part for part in file.relative_to(folder).parts):
                continue
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size
    return size


def report(label: str, total: int, measured: tuple[float, float], **more: int) -> None:
    """Prints one measurement."""
    seconds, peak = measured
    figures = {
        "run": label,
        "bytes": total,
        "seconds": round(seconds, 1),
        "MB_per_s": round(total / seconds / 1e6, 1),
        "peak_rss_MB": round(peak / 1e6),
    }
    print(json.dumps(figures | more), flush=True)


def compare(a: Path, b: Path) -> bool:
    """Compares two folders bit for bit, and prints the verdict and what it cost."""
    start = time.monotonic()
    done = subprocess.run([*COMMAND, "compare", str(a), str(b)], stdout=subprocess.PIPE, text=True, check=False)
    verdict = done.stdout.strip().splitlines()[-1:] or ["no answer"]
    print(
        json.dumps({"run": "compare", "seconds": round(time.monotonic() - start, 1), "verdict": verdict[0]}), flush=True
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
