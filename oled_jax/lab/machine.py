"""Machines: what moving and computing costs, read from small TOML files, and made into costs for one model's geometry.

A file speaks of bandwidths and fixed overheads, never of experts of one size, so that it serves any model. Those that
ship with the package are in ``configs/machines``; each says where every number comes from. ``oled_jax.dispatch``
decides by the costs, ``oled_jax.lab.timing`` counts by them. Numpy only; measures nothing.
"""

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from oled_jax.arguments import is_number
from oled_jax.config import ModelConfig
from oled_jax.dispatch import TICK, LayerCosts
from oled_jax.errors import OledError, problem_list
from oled_jax.files import read_bytes

_SUFFIX = ".toml"
SOURCES = ("measured", "public figures", "calibrated")
READS = ("wanted", "slots")


def _bandwidth() -> Any:
    return dataclasses.field(metadata={"positive": True})


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Bytes of a model's weights, as far as time goes by them.

    ``expert_bytes``: one routed expert. ``layer_bytes``: what else a MoE layer reads in a forward (attention, router,
    shared expert). ``other_bytes``: what a forward reads beside its MoE layers (dense layers, head); ``dense_layers``.
    Normalisation weights, embeddings and the KV cache are left out: less than a hundredth.
    """

    expert_bytes: int
    layer_bytes: int = 0
    other_bytes: int = 0
    dense_layers: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> "Geometry":
        """That of a model with weights of the dtype that its config announces."""
        c, itemsize = config, 2 if config.dtype == "bfloat16" else 4
        heads = c.num_attention_heads
        attention = c.hidden_size * c.head_dim * (2 * heads + 2 * c.num_key_value_heads)
        expert = 3 * c.hidden_size * c.moe_intermediate_size
        layer = attention + c.num_experts * c.hidden_size + c.num_shared_experts * expert
        dense = c.first_k_dense_replace * (attention + 3 * c.hidden_size * c.intermediate_size)
        head = c.vocab_size * c.hidden_size
        return cls(itemsize * expert, itemsize * layer, itemsize * (dense + head), c.first_k_dense_replace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """Host to device, pinned memory. ``bandwidth`` and ``shared_bandwidth`` (while the host computes): bytes a second;
    ``expert_overhead``: seconds per transfer."""

    bandwidth: float = _bandwidth()
    shared_bandwidth: float = _bandwidth()
    expert_overhead: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """``memory_bandwidth``: bytes a second at which products read weights. ``token_bandwidth``: bytes of weights that
    are multiplied with one token a second. ``layer_overhead``: seconds for a layer's experts, however many; and
    ``expert_overhead`` for each that is computed alone. ``reads``: what the product for the hits reads, the ``wanted``
    experts or all ``slots``; in the latter case fetched experts are computed with it. ``overlaps``: whether transfers
    proceed while the device computes."""

    memory_bandwidth: float = _bandwidth()
    token_bandwidth: float = _bandwidth()
    layer_overhead: float
    expert_overhead: float
    reads: str = dataclasses.field(metadata={"choices": READS})
    overlaps: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFigures:
    """``bandwidth`` and ``shared_bandwidth`` (while the link is busy): bytes a second at which an expert's weights are
    read, once for all its tokens; ``total_bandwidth``: of the host's memory. ``token_bandwidth``: as of the device, on
    top of reading.
    ``layer_overhead``: seconds for handing a layer's work over and back; ``expert_overhead`` for each expert."""

    bandwidth: float = _bandwidth()
    shared_bandwidth: float = _bandwidth()
    total_bandwidth: float = _bandwidth()
    token_bandwidth: float = _bandwidth()
    layer_overhead: float
    expert_overhead: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Seconds. ``overhead``: per forward, starting the program and reading its report. ``layer_overhead``: per layer,
    all but its experts and reading its weights. ``join_overhead``: per layer, bringing device and host together."""

    overhead: float
    layer_overhead: float
    join_overhead: float


_SECTIONS = {"link": LinkFigures, "device": DeviceFigures, "host": HostFigures, "step": StepFigures}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine. ``source``: ``measured``, ``public figures`` or ``calibrated``. ``host`` None: experts cannot run on
    the host. OledError, naming every problem, from ``from_toml`` and ``read_machine``."""

    name: str
    source: str
    link: LinkFigures
    device: DeviceFigures
    step: StepFigures
    host: HostFigures | None = None

    @classmethod
    def from_toml(cls, text: str, where: str) -> "Machine":
        """Reads the text of a machine file; ``where`` is what errors call it."""
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise OledError(f"{where} cannot be read as TOML: {error}") from None
        problems: list[str] = []
        known = ["name", "source", *_SECTIONS]
        problems += [f"unknown key {key!r}; the keys are {', '.join(known)}" for key in raw if key not in known]
        name, source = raw.get("name"), raw.get("source")
        if not isinstance(name, str) or not name:
            problems.append("name is missing" if name is None else f"name is {name!r}, expected a word")
        if source not in SOURCES:
            said = "missing" if source is None else repr(source)
            problems.append(f"source is {said}; it can be {', '.join(SOURCES)}")
        sections = {}
        for section, kind in _SECTIONS.items():
            if section in raw:
                sections[section] = _section(section, kind, raw[section], problems)
            elif section != "host":
                problems.append(f"[{section}] is missing")
        if problems:
            raise OledError(problem_list(f"machine {where}", problems))
        return cls(name=name, source=source, **sections)

    def layer_costs(self, geometry: Geometry, capacity: int, staging: int = 4) -> LayerCosts:
        """Costs of a MoE layer. ``capacity`` and ``staging``: slots and rows beside them, which count where one product
        reads all of them and experts without a slot take rounds."""
        device, host, expert = self.device, self.host, geometry.expert_bytes
        read, multiply = expert / device.memory_bandwidth, expert / device.token_bandwidth
        slots = device.reads == "slots"
        one_pass = device.layer_overhead + slots * (capacity + staging) * read
        times = {
            "hits_start": one_pass,
            "round": one_pass if slots else 0.0,
            "hit": 0.0 if slots else read,
            "hit_token": 0.0 if slots else multiply,
            "device_expert": 0.0 if slots else read + device.expert_overhead,
            "device_token": 0.0 if slots else multiply,
            "load": self.link.expert_overhead + expert / self.link.bandwidth,
            "load_shared": self.link.expert_overhead + expert / self.link.shared_bandwidth,
            "attention": self.step.layer_overhead + geometry.layer_bytes / device.memory_bandwidth,
            "join": self.step.join_overhead,
        }
        if host:
            times |= {
                "host_start": host.layer_overhead,
                "host_expert": host.expert_overhead + expert / host.bandwidth,
                "host_expert_shared": host.expert_overhead + expert / host.shared_bandwidth,
                "host_token": expert / host.token_bandwidth,
                "host_read": expert / host.total_bandwidth,
            }
        ticks = {name: round(seconds / TICK) for name, seconds in times.items()}
        try:
            rows = {"slots": capacity, "staging": staging} if slots else {}
            return LayerCosts(**ticks, **rows, overlaps=device.overlaps, has_host=host is not None)
        except OledError as error:
            raise OledError(f"machine {self.name} with experts of {expert:,} bytes: {error}") from None

    def step_seconds(self, geometry: Geometry) -> float:
        """What a forward takes beside its MoE layers."""
        reading = geometry.other_bytes / self.device.memory_bandwidth
        return self.step.overhead + geometry.dense_layers * self.step.layer_overhead + reading

    def load_seconds(self, geometry: Geometry) -> float:
        """One expert over the link while the host does nothing."""
        return self.link.expert_overhead + geometry.expert_bytes / self.link.bandwidth

    def slower_link(self, times: float) -> "Machine":
        """The machine with a link on which each transfer takes so many times as long; OledError below 1."""
        if not is_number(times) or not 1 <= times <= 1000:
            raise OledError(f"a link can be made 1 to 1000 times slower, not {times!r} times")
        link = LinkFigures(
            bandwidth=self.link.bandwidth / times,
            shared_bandwidth=self.link.shared_bandwidth / times,
            expert_overhead=self.link.expert_overhead * times,
        )
        return dataclasses.replace(self, name=f"{self.name}, link / {times:g}", link=link)


def machine_names() -> tuple[str, ...]:
    """Names of the machines that ship with the package, sorted."""
    files = (resources.files("oled_jax.configs") / "machines").iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))


def read_machine(name: str | Path) -> Machine:
    """One of ``machine_names``, or the path of a file that ends in ``.toml``.

    OledError for another name (with the list), a file that cannot be read, and a missing, unknown or impossible key.
    """
    text = str(name)
    if text in machine_names():
        return Machine.from_toml(
            (resources.files("oled_jax.configs") / "machines" / f"{text}{_SUFFIX}").read_text(), text
        )
    if not text.endswith(_SUFFIX):
        raise OledError(f"unknown machine {text!r}: the machines are {', '.join(machine_names())}, or a {_SUFFIX} file")
    try:
        content = read_bytes(Path(text)).decode()
    except OSError as error:
        raise OledError(f"machine file {text} cannot be read: {error.strerror}") from None
    except ValueError as error:  # bytes that are no text, or a NUL in the path
        raise OledError(f"machine file {text!r} cannot be read: {error}") from None
    return Machine.from_toml(content, text)


def _section(section: str, kind: type, raw: Any, problems: list[str]) -> Any:
    """``raw`` as a ``kind``, None if anything is wrong with it, which is added to ``problems``."""
    if not isinstance(raw, dict):
        problems.append(f"{section} is {raw!r}, expected a table [{section}]")
        return None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    found = [f"[{section}] has an unknown key {key!r}; its keys are {', '.join(fields)}" for key in raw.keys() - fields]
    for name, field in fields.items():
        if name in raw:
            found += [f"{section}.{name} is {raw[name]!r}; it must be {need}" for need in _unmet(field, raw[name])]
        elif field.default is dataclasses.MISSING:
            found.append(f"{section}.{name} is missing")
    problems += sorted(found)
    return None if found else kind(**raw)


def _unmet(field: dataclasses.Field, value: Any) -> list[str]:
    """At most one: what ``value`` would have to be."""
    if "choices" in field.metadata:
        choices = field.metadata["choices"]
        return [] if value in choices else [" or ".join(map(repr, choices))]
    if field.type is bool:
        return [] if isinstance(value, bool) else ["true or false"]
    if field.metadata.get("positive"):
        return [] if is_number(value) and 1 <= value < 1e18 else ["a number of bytes a second, above 0"]
    return [] if is_number(value) and 0 <= value < 1e3 else ["a number of seconds, not negative"]
