"""Placements that hold still: drawn at random, whole first layers, or picked anew at each block.

What a placement that never changes holds is set-up and not a miss; everything else that is wanted misses every time,
whether it is then streamed to the device or run on the host, which is the dispatch's affair. The placement by
calibration counts, ``static-frequency``, is with the policies that count (``oled_jax.retention.frequency``); given the
counts of the evaluated trace itself, it is the bound for all of these.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.errors import OledError
from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, ranks, vote_sums
from oled_jax.retention.budgets import front_budget
from oled_jax.retention.fixed_point import hashed
from oled_jax.retention.policy import RetentionPolicy, slots_array
from oled_jax.retention.record import KV_WRITE, Plan, StepRecord, takes_part

_UNIFORM_SALT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedPolicy(RetentionPolicy):
    """Never changes what it holds. The state is the rank of each expert, int32 ``[L, E]``: the highest are held."""

    admits: ClassVar[bool] = False

    @property
    def static_keep(self) -> bool:
        """Always."""
        return True

    def initial_residents(self, num_layers: int, num_experts: int, capacity: int) -> np.ndarray:
        """The ``capacity`` experts of each layer that rank highest."""
        return self.init(num_layers, num_experts, capacity, np) >= num_experts - capacity

    def plan(self, state, layer, demand, counts, gates, resident, xp) -> Plan:
        """Admits nobody."""
        return Plan(state[layer], ranks((counts,), xp), xp.full(demand.shape, False))

    def observe(self, state, record, xp) -> Array:
        """Nothing to learn."""
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticUniform(FixedPolicy):
    """Holds experts drawn at random, as many in every layer, and never changes."""

    name: ClassVar[str] = "static-uniform"

    seed: int = parameter(0, high=2**31 - 1)

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> Array:
        """One draw per layer."""
        layers = np.arange(num_layers, dtype=np.int32)
        return xp.asarray(ranks((hashed(self.seed, 0, layers, num_experts, _UNIFORM_SALT, np),), np))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticFront(FixedPolicy):
    """Holds all experts of the first layers, as far as the slots of all layers together go, and none of the last.

    Needs layers with unequal numbers of slots (``slots``), so it cannot run where all have the same, as in the engine.
    """

    name: ClassVar[str] = "static-front"
    equal_slots: ClassVar[bool] = False

    def slots(self, num_layers: int, num_experts: int, capacity: int) -> np.ndarray:
        """Every slot in the first layers."""
        return front_budget(num_layers, num_experts, num_layers * capacity)

    def init(self, num_layers: int, num_experts: int, capacity: Any, xp: Any, *, sequences: int = 1) -> Array:
        """By id; OledError if ``capacity`` is one number for all layers."""
        if np.ndim(capacity) == 0:
            raise OledError(
                f"policy {self.name} fills the first layers and leaves the last empty, but here every layer has "
                f"{capacity} slots: choose a policy that holds as many experts in every layer, such as static-uniform"
            )
        return xp.asarray(ranks((np.zeros((num_layers, num_experts), np.int32),), np))


class BlockState(NamedTuple):
    """``sequence``, ``block`` int32 ``[S]``: whom each row belongs to, -1 for nobody. int32 ``[S, L, E]``, tokens per
    expert: ``running``, since the sequence's block began; ``picked``, of its last whole block. ``slots`` int32
    ``[L, 1]``."""

    sequence: Array
    block: Array
    running: Array
    picked: Array
    slots: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticBlock(RetentionPolicy):
    """Picks at each block's start the experts that most tokens chose in the last block, and holds those.

    A block ends with the forward that writes its keys and values. Moving a picked expert before anybody wants it would
    be speculation, so it enters when it is first missed, and only picked ones do: the cost of a new pick is in the
    misses. Starts with experts 0 to C-1. In a batch, the last blocks of all its sequences are added.
    """

    name: ClassVar[str] = "static-block"
    reads_tokens: ClassVar[bool] = True

    @property
    def contested(self) -> bool:
        """A picked expert takes the place of one that ranks lower, never of a better one."""
        return True

    def initial_residents(self, num_layers: int, num_experts: int, capacity: int) -> np.ndarray:
        """The first ``capacity`` experts, which stand for a pick before there was any block."""
        first = ranks((np.zeros((num_layers, num_experts), np.int32),), np)
        return first >= num_experts - capacity

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> BlockState:
        """No block yet."""
        shape = (sequences, num_layers, num_experts)
        return BlockState(
            xp.full(sequences, -1, dtype=xp.int32),
            xp.full(sequences, -1, dtype=xp.int32),
            xp.zeros(shape, xp.int32),
            xp.zeros(shape, xp.int32),
            slots_array(num_layers, capacity, xp),
        )

    def for_batch(self, state: BlockState, sequences: int, xp: Any) -> BlockState:
        """Starts over."""
        _, layers, experts = state.picked.shape
        return self.init(layers, experts, state.slots, xp, sequences=sequences)

    def plan(self, state: BlockState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By tokens in the last block; the C best may enter."""
        keep = ranks((state.picked[:, layer].sum(0, dtype=xp.int32),), xp)
        return Plan(keep, ranks((counts,), xp), keep >= keep.shape[-1] - state.slots[layer])

    def observe(self, state: BlockState, record: StepRecord, xp) -> BlockState:
        """Counts on, and closes blocks: with their writing forward, or when the next one is seen."""
        sequence, block = xp.asarray(record.sequence, xp.int32), xp.asarray(record.block, xp.int32)
        deciding = takes_part(record, xp)
        same = (sequence == state.sequence) & (sequence >= 0)
        running = xp.where(_rows(same), state.running, 0)
        picked = xp.where(_rows(same), state.picked, 0)
        crossed = same & deciding & (state.block >= 0) & (block != state.block)
        picked = xp.where(_rows(crossed) & running.any((1, 2), keepdims=True), running, picked)
        running = xp.where(_rows(crossed), 0, running)
        if record.routing is not None:
            routing, one = record.routing, xp.ones((1, 1), xp.int32)
            more = vote_sums(routing.ids, one, routing.row, sequence.shape[0], picked.shape[-1], xp)
            running = running + xp.where(_rows(deciding), more, 0)
        written = deciding & (xp.asarray(record.phase) == KV_WRITE)
        return BlockState(
            sequence,
            xp.where(deciding, block, xp.where(same, state.block, -1)),
            xp.where(_rows(written), 0, running),
            xp.where(_rows(written), running, picked),
            state.slots,
        )


def _rows(flags: Array) -> Array:
    """``[S]`` as ``[S, 1, 1]``."""
    return flags[:, None, None]
