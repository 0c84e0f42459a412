"""The retention manager: keeps a policy's state on the host, and is consulted once a forward.

It takes the record of the forward just run and answers with the arrays that the next one ranks by. The same policy can
learn inside the jitted step instead (``OffloadedExperts.observes``); decisions are the same either way, because
policies are pure and exact in numpy and in JAX. The manager is never needed for correctness: whatever it answers, a
step loads what it misses.
"""

import time
from typing import Any

import numpy as np

from oled_jax.retention.policy import RetentionPolicy
from oled_jax.retention.record import StepRecord


class RetentionManager:
    """``state``: what to send into the next forward, a pytree of numpy arrays; ``seconds``: spent on all answers."""

    def __init__(self, policy: RetentionPolicy, num_layers: int, num_experts: int, capacity: int):
        self._policy = policy
        self.seconds = 0.0
        self.state = policy.init(num_layers, num_experts, capacity, np)

    def begin(self, sequences: int) -> Any:
        """The state for a new batch of ``sequences`` rows."""
        self.state = self._policy.for_batch(self.state, sequences, np)
        return self.state

    def observe(self, record: StepRecord) -> Any:
        """Takes one forward's ``record`` in; the state for the next."""
        began = time.perf_counter()
        self.state = self._policy.observe(self.state, record, np)
        self.seconds += time.perf_counter() - began
        return self.state
