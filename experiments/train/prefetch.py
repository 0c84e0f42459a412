"""Batches made ahead of time by other processes, in order.

Promises: what comes out is what ``BatchMaker`` gives for these steps, whatever the number of workers, so that a resumed
run continues exactly. A worker is a fresh Python that runs this file: it shares nothing with the caller, imports
neither JAX nor the caller's script, and keeps one batch ready; it ends when the caller closes its pipe or dies.

Deliberately not here: threads and queues. A worker that is ahead waits in its pipe.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
from batches import Batch, BatchConfig, BatchMaker

from oled_jax.errors import OledError

_DTYPES = Batch(np.int32, np.int32, np.int32, np.bool_, np.int32)


class Prefetcher:
    """Iterates over ``(step, Batch)`` from ``first_step`` on without end; a context manager, since it owns processes.

    ``workers`` batches are ready or being made at any time. Raises OledError when there is no worker, and while
    iterating, when one has ended; what it had to say is on stderr by then.
    """

    def __init__(self, config: BatchConfig, *, seed: int, first_step: int = 0, workers: int = 4):
        if workers < 1:
            raise OledError(f"{workers} workers make no batches: give 1 or more")
        self._config = config
        self._first_step = first_step
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._workers = []
        for i in range(workers):
            command = [sys.executable, __file__]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._workers.append(worker)
            with contextlib.suppress(BrokenPipeError), worker.stdin:  # a worker that has failed is told of when read
                pickle.dump((config, seed, first_step + i, workers), worker.stdin)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        step = self._first_step
        while True:
            yield step, self._receive(self._workers[(step - self._first_step) % len(self._workers)])
            step += 1

    def close(self) -> None:
        """Ends the workers; there are no more batches then."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.stdout.close()
            worker.wait()

    def _receive(self, worker: subprocess.Popen) -> Batch:
        shape = self._config.rows, self._config.length
        arrays = []
        for dtype in _DTYPES:
            array = np.empty(shape, dtype)
            # The reader is buffered and reads on until the array is full or the pipe ends.
            if worker.stdout.readinto(array.data.cast("B")) != array.nbytes:
                raise OledError(f"a worker that makes batches has ended with code {worker.wait()}")
            arrays.append(array)
        return Batch(*arrays)


def _work() -> int:
    """What a worker does: reads its orders, then writes batches until nobody reads them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller, who is interrupted as well, decides
    config, seed, step, stride = pickle.load(sys.stdin.buffer)
    try:
        make = BatchMaker(config)
        while True:
            for array in make(seed, step):
                sys.stdout.buffer.write(array.tobytes())
            sys.stdout.buffer.flush()
            step += stride
    except OledError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere
        return 0


if __name__ == "__main__":
    sys.exit(_work())
