"""Dispatch: which of a layer's misses are fetched and which run on the host, as pure functions.

    rule = dispatch_by_name("oled:swaps=4")
    dispatch = rule.split(LayerDemand(counts, hits, missing, reuse, last), costs, xp)

The replay calls this on the host for all layers at once, the engine inside its jitted step, layer by layer; both decide
alike, because there are only integers. ``LayerCosts`` come from a machine file (``oled_jax.lab.machine``). Importing
this package imports numpy and not jax.

Deliberately not here: who stays on the device afterwards (``oled_jax.retention``), moving weights, running experts.
"""

from oled_jax.dispatch.costs import TICK, Dispatch, LayerCosts, LayerDemand, finish_times
from oled_jax.dispatch.registry import dispatch_by_name, dispatch_names
from oled_jax.dispatch.rules import ALL_DEVICE, DispatchRule

__all__ = [
    "ALL_DEVICE",
    "TICK",
    "Dispatch",
    "DispatchRule",
    "LayerCosts",
    "LayerDemand",
    "dispatch_by_name",
    "dispatch_names",
    "finish_times",
]
