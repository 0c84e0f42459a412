"""The laboratory: traces, replays and bounds. Needs numpy and safetensors; never imports JAX.

``TraceWriter`` makes a trace of what an engine tells ``on_record``; ``read_trace`` reads it back; ``Stream`` selects
the forwards to replay; ``replay`` counts what a policy, or a bound, hits and misses on them. All of it is exact.

Deliberately not here: times and bandwidths (a replay counts), and the policies themselves (``oled_jax.retention``).
"""

from oled_jax.lab.bounds import BOUNDS
from oled_jax.lab.recording import TraceWriter
from oled_jax.lab.replay import Counters, Replay, gap_closure, replay, rule_by_name, rule_names
from oled_jax.lab.stream import Stream
from oled_jax.lab.trace import Trace, read_trace, write_trace

__all__ = [
    "BOUNDS",
    "Counters",
    "Replay",
    "Stream",
    "Trace",
    "TraceWriter",
    "gap_closure",
    "read_trace",
    "replay",
    "rule_by_name",
    "rule_names",
    "write_trace",
]
