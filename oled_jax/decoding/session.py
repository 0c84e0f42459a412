"""What stays between forwards on the experts' side: the donated state, the retention manager, and the counters.

Promises: whoever runs a program stores the state that comes back here at once, so that an interrupt or a failing
callback between two programs loses nothing; should an interrupt strike inside that instant, the next generation notices
that the arrays are gone and starts from empty slots. Counting one forward waits until the next has been dispatched, so
that the device does not wait for it; only the manager's own answer is on the critical path.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.config import ModelConfig
from oled_jax.decoding.report import Report, unpacked
from oled_jax.metrics import ExpertMetrics, TrafficCounter
from oled_jax.model.experts import ExpertRunner, ExpertWeights
from oled_jax.model.numerics import Array
from oled_jax.retention.manager import RetentionManager
from oled_jax.retention.record import StepRecord


class ExpertSession:
    """Owns the expert state of one engine. ``state`` is donated to programs, and replaced by what they give back."""

    def __init__(
        self,
        config: ModelConfig,
        runner: ExpertRunner,
        experts: dict[int, ExpertWeights],
        new_manager: Callable[[], RetentionManager] | None = None,
    ):
        """``new_manager`` makes the manager where retention is decided on the host; None where the step does it."""
        self._config = config
        self._runner = runner
        self._new_manager = new_manager
        self._numbered = 0
        self._weights = experts
        self.store, self.state = runner.init(experts)
        self._manager = new_manager() if new_manager else None
        self._on_record: Callable[[StepRecord], None] | None = None
        self._counter = TrafficCounter(len(config.moe_layers), config.num_experts)
        self._uncounted: list[Report] = []
        self._seconds_before = 0.0

    def begin(self, sequences: int, on_record: Callable[[StepRecord], None] | None = None) -> np.ndarray:
        """Starts a batch of ``sequences`` rows with fresh counters; their numbers, int32 ``[sequences]``.

        ``on_record`` is called with the record of every forward, prefill included.
        """
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state) if isinstance(leaf, jax.Array)):
            _, self.state = self._runner.init(self._weights)
            self._manager = self._new_manager() if self._new_manager else None
        if self._manager:
            self.state = self._runner.with_retention(self.state, self._manager.begin(sequences))
            self._seconds_before = self._manager.seconds
        else:
            self.state = self._runner.for_batch(self.state, sequences, jnp)
        self._on_record = on_record
        self._counter = TrafficCounter(len(self._config.moe_layers), self._config.num_experts)
        self._uncounted = []
        numbers = np.arange(self._numbered, self._numbered + sequences, dtype=np.int32)
        self._numbered += sequences
        return numbers

    def observe(self, vector: Array, batch: int, tokens: int) -> Report:
        """Waits for a forward's packed report, over ``batch`` rows of ``tokens`` tokens, and takes it in."""
        self._count()
        report = unpacked(np.asarray(vector), self._config, batch, tokens)
        if self._manager:
            self.state = self._runner.with_retention(self.state, self._manager.observe(report.record))
        self._uncounted.append(report)
        if self._on_record:
            self._on_record(report.record)
        return report

    def metrics(self) -> ExpertMetrics:
        """What the experts cost since ``begin``."""
        self._count()
        seconds = self._manager.seconds - self._seconds_before if self._manager else 0.0
        expert = jax.tree.map(lambda array: array.nbytes // array.shape[0], next(iter(self._weights.values())))
        return self._counter.metrics(self._runner, expert.gate_up + expert.down, seconds)

    def _count(self) -> None:
        while self._uncounted:
            report = self._uncounted.pop()
            self._counter.add(report.record, self._runner.rounds(report.record))
