"""The seam: what every retention policy answers, and what most of them share (recency, tie rules, parameters)."""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.parameters import Parameterised, parameter
from oled_jax.retention.arrays import Array
from oled_jax.retention.fixed_point import hashed
from oled_jax.retention.record import Plan, Routing, StepRecord
from oled_jax.retention.semantics import MODES

TIES = ("id", "load", "hash")
_TIE_SALT = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A numpy array as a policy's parameter: read-only, compared and hashed by content. ``source`` is its file.

    The field is a plain one, None without a table, whose metadata name the number of ``axes``.
    """

    array: np.ndarray
    source: str = ""

    def __post_init__(self):
        array = np.array(self.array)
        array.flags.writeable = False
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "_key", (array.shape, array.dtype.str, array.tobytes()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)  # hashes of bytes are kept by the interpreter


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionPolicy(Parameterised, abc.ABC):
    """Decides which experts keep their slots. Frozen and hashable (static under jit); its arrays are in the state.

    The state, a pytree of int32 and bool arrays, changes in ``observe`` alone, once a forward. OledError for a
    parameter out of its range.
    """

    noun: ClassVar[str] = "policy"
    admits: ClassVar[bool] = True
    """False for a policy that never admits an expert: its residents stay ``initial_residents``, after prefill too."""
    reads_tokens: ClassVar[bool] = False
    """True if ``plan`` needs ``gates`` and ``observe`` needs ``record.routing``."""

    equal_slots: ClassVar[bool] = True
    """False for a policy whose layers must have unequal numbers of slots, which the engine cannot give them."""

    mode: str = parameter("protect", choices=MODES)

    @property
    def contested(self) -> bool:
        """True if in mode ``protect`` a candidate must outrank the resident it would replace."""
        return False

    @property
    def static_keep(self) -> bool:
        """True if ``keep_rank``, as far as the step reads it, does not depend on the running forward's demand.

        Then it can be evaluated once before the forward, for all layers (``static_keep_rank``).
        """
        return self.mode == "protect" and not self.contested

    def slots(self, num_layers: int, num_experts: int, capacity: int) -> int | np.ndarray:
        """How the slots are shared out, where there are ``capacity`` per layer on average: that number, or int32
        ``[L, 1]``. What comes back is the capacity to give to ``init``, ``initial_residents`` and ``step``."""
        return capacity

    def initial_residents(self, num_layers: int, num_experts: int, capacity: int) -> np.ndarray:
        """Experts to place before the first forward, bool ``[L, E]``, counted as set-up and not as misses."""
        return np.zeros((num_layers, num_experts), bool)

    @abc.abstractmethod
    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> Any:
        """The state before the first forward; ``sequences`` is the number of rows S of the batch. ``capacity``: slots
        per layer, or int32 ``[L, 1]`` where layers differ (``oled_jax.retention.budgets``).

        OledError when a table of the policy does not fit the model.
        """

    def for_batch(self, state: Any, sequences: int, xp: Any) -> Any:
        """``state`` for a new batch of ``sequences`` rows: what was known of earlier sequences goes, the rest stays."""
        return state

    def gates(self, state: Any, routing: Routing, num_experts: int, xp: Any) -> Array | None:
        """What the running forward's own routing says about the next one, int32 ``[..., E]``, in units of the policy's.

        None for a policy whose ``reads_tokens`` is false. ``routing`` as known before this forward's sampling.
        """
        return None

    @abc.abstractmethod
    def plan(
        self,
        state: Any,
        layer: Any,
        demand: Array,
        counts: Array,
        gates: Array | None,
        resident: Array,
        xp: Any,
    ) -> Plan:
        """Ranks the experts of ``layer``: an index (Python or traced; arrays ``[E]``) or ``slice(None)`` (``[L, E]``).

        ``demand`` and ``resident`` (before the step) bool, ``counts`` int32 (tokens per expert), ``gates`` from
        ``gates``. Reads the state, never changes it.
        """

    @abc.abstractmethod
    def observe(self, state: Any, record: StepRecord, xp: Any) -> Any:
        """The state for the next forward, given this one after its sampling. Pure; shapes and dtypes stay."""

    def _spelled(self, value: Any) -> str:
        return value.source if isinstance(value, Table) else super()._spelled(value)

    def _problem(self, field: dataclasses.Field, value: Any) -> Iterable[str]:
        axes = field.metadata.get("axes")
        if axes is None:
            yield from super()._problem(field, value)
        elif value is not None and (not isinstance(value, Table) or value.array.ndim != axes):
            shape = value.array.shape if isinstance(value, Table) else type(value).__name__
            yield f"{field.name} is {shape}; it must be a table of {axes} axes"


class Recency(NamedTuple):
    """``forward`` int32 ``[]``: index of the forward to come. ``last`` int32 ``[L, E]``: the forward in which an expert
    was last wanted, resident or not, -1 if never; ``load`` int32 ``[L, E]``: how many tokens wanted it then."""

    forward: Array
    last: Array
    load: Array

    @classmethod
    def start(cls, num_layers: int, num_experts: int, xp: Any) -> "Recency":
        """Nothing was ever wanted."""
        shape = (num_layers, num_experts)
        return cls(xp.zeros((), xp.int32), xp.full(shape, -1, xp.int32), xp.zeros(shape, xp.int32))

    def seen(self, record: StepRecord, xp: Any) -> "Recency":
        """Recency after ``record``, prefill included."""
        forward = xp.asarray(record.forward, xp.int32)
        wanted = record.counts > 0
        last = xp.where(wanted, forward, self.last)
        return Recency(forward + 1, last, xp.where(wanted, xp.asarray(record.counts, xp.int32), self.load))

    def last_of(self, layer: Any, demand: Array, xp: Any) -> Array:
        """``last`` as it stands when this forward's demand has been served."""
        return xp.where(demand, self.forward, self.last[layer])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedPolicy(RetentionPolicy):
    """A policy with recency and a tie rule; what it leaves equal goes by id.

    ``id``: the smaller id stays; ``load``: what more tokens wanted at its last use stays; ``hash``: a fixed random
    order per layer, drawn from ``seed``.
    """

    tie: str = parameter("id", choices=TIES)
    seed: int = parameter(0, high=2**31 - 1)

    def _tie_keys(self, recency: Recency, layer: Any, demand: Array, counts: Array, xp: Any) -> tuple[Array, ...]:
        if self.tie == "load":
            return (xp.where(demand, counts, recency.load[layer]),)
        if self.tie == "hash":
            layers, experts = recency.last.shape
            return (hashed(self.seed, 0, xp.arange(layers)[layer], experts, _TIE_SALT, xp),)
        return ()


def admits_all(demand: Array, xp: Any) -> Array:
    """``may_admit`` of a policy that lets everyone in."""
    return xp.full(demand.shape, True)


def slots_array(num_layers: int, capacity: int | Array, xp: Any) -> Array:
    """The slots of each layer, int32 ``[L, 1]``, of one number for all or of one per layer already."""
    return xp.zeros((num_layers, 1), xp.int32) + xp.asarray(capacity, xp.int32)


def static_keep_rank(policy: RetentionPolicy, state: Any, xp: Any, num_layers: int, num_experts: int) -> Array:
    """``keep_rank`` for all layers before a forward, int32 ``[L, E]``; only where ``policy.static_keep``."""
    nobody = xp.zeros((num_layers, num_experts), bool)
    zeros = xp.zeros((num_layers, num_experts), xp.int32)
    return policy.plan(state, slice(None), nobody, zeros, zeros, nobody, xp).keep_rank
