"""The laboratory: traces, replays and bounds. Needs numpy and safetensors; never imports JAX.

``TraceWriter`` makes a trace of what an engine tells ``on_record``; ``read_trace`` reads it back; ``Stream`` selects
the forwards to replay; ``replay`` counts what a policy, with or without a prefetcher, or a bound hits, misses and loads
on them; ``Sweep`` does so for many policies beside their yardsticks. Counts are exact; times, where a machine is
assumed (``Setup``), are a model and named ``simulated``.

Deliberately not here: the retention policies themselves (``oled_jax.retention``).
"""

from oled_jax.lab.bounds import BOUNDS
from oled_jax.lab.recording import TraceWriter
from oled_jax.lab.replay import replay
from oled_jax.lab.results import Counters, Replay, gap_closure
from oled_jax.lab.rules import rule_by_name, rule_names
from oled_jax.lab.stream import Stream
from oled_jax.lab.sweep import Sweep
from oled_jax.lab.timeline import Setup
from oled_jax.lab.trace import Trace, read_trace, write_trace

__all__ = [
    "BOUNDS",
    "Counters",
    "Replay",
    "Setup",
    "Stream",
    "Sweep",
    "Trace",
    "TraceWriter",
    "gap_closure",
    "read_trace",
    "replay",
    "rule_by_name",
    "rule_names",
    "write_trace",
]
