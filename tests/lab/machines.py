"""A small model of the traces' geometry, and machines with round numbers for it."""

import dataclasses

from oled_jax.config import ModelConfig
from oled_jax.dispatch import dispatch_by_name
from oled_jax.lab.machine import DeviceFigures, Geometry, HostFigures, LinkFigures, Machine, StepFigures
from oled_jax.lab.timeline import Setup
from tests.lab.traces import EXPERTS, LAYERS

CONFIG = dataclasses.replace(
    ModelConfig.from_preset("llada2.0-mini"),
    num_hidden_layers=1 + LAYERS,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)
EXPERT = Geometry.of(CONFIG).expert_bytes


def machine(load: float = 1e-3, *, host: float | None = None, overlaps: bool = True) -> Machine:
    """Seconds of an expert: ``load`` to move it, ``host`` to run it there for one token (None: not at all), 100 us to
    run it on the device. A layer takes 1 ms before its experts, a forward 1 ms beside its layers."""
    bandwidth = EXPERT / load
    figures = HostFigures(
        bandwidth=EXPERT / (host or 1),
        shared_bandwidth=EXPERT / (host or 1),
        total_bandwidth=1e17,
        token_bandwidth=1e17,
        layer_overhead=0.0,
        expert_overhead=0.0,
    )
    return Machine(
        name="round numbers",
        source="calibrated",
        link=LinkFigures(bandwidth=bandwidth, shared_bandwidth=bandwidth, expert_overhead=0.0),
        device=DeviceFigures(
            memory_bandwidth=1e17,
            token_bandwidth=1e17,
            layer_overhead=0.0,
            expert_overhead=1e-4,
            reads="wanted",
            overlaps=overlaps,
        ),
        step=StepFigures(overhead=0.0, layer_overhead=1e-3, join_overhead=0.0),
        host=None if host is None else figures,
    )


def setup(load: float = 1e-3, *, host: float | None = None, dispatch: str = "all-device", **options) -> Setup:
    """See ``machine``."""
    return Setup(machine(load, host=host, **options), CONFIG, dispatch_by_name(dispatch))
