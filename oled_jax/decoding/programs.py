"""The jitted programs of a loaded model: prefill, logits, block entry, one denoising step.

Promises: each program is compiled once per shape, ahead of its first call, and the number of shapes is bounded (a few
token counts, and one per bucket of looked-at cache length); ``compiled`` counts them and ``compile_seconds`` says what
they cost. Weights enter as a flat tuple of leaves (flattening a module costs more than dispatching the step,
spec/jax_practice 2.2); expert state and block states are donated and updated in place, and so is the cache where it is
written (prefill and commit; a denoising step only reads it).

A denoising step is ONE program: model, head, decoding rule. What the host needs from it comes back as one small array
in host memory. The decoding loop (``oled_jax.decoding.loop``) owns every donated array; nothing here keeps one.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oled_jax.config import ModelConfig
from oled_jax.decoding.rule import BlockState, Program
from oled_jax.model.experts import ExpertRunner
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.numerics import Array
from oled_jax.model.transformer import Experts, Forward, LLaDA2

SMALLEST_WINDOW = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The batch on the device, one row per sequence: ``start [B]`` of the active block, ``active [B]``, ``seed [B]``
    uint32, and ``block``, a ``BlockState`` with a leading batch axis."""

    start: Array
    active: Array
    seed: Array
    block: BlockState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """Blocks to enter, as numpy arrays from the host: ``rows [B]`` which, ``start [B]``, ``tokens [B, bl]``,
    ``fixed [B, bl]`` (prompt positions), ``clean [B]``; ``active [B]`` is set for all rows."""

    rows: Any
    start: Any
    tokens: Any
    fixed: Any
    clean: Any
    active: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """Keys and values of a forward's own tokens, ``[L, B, T, KV, D]``, not committed yet."""

    keys: Array
    values: Array

    @classmethod
    def zeros(cls, cache: KVCache, block_length: int) -> "Staged":
        """Room for one block of every sequence of ``cache``."""
        layers, batch, _, *rest = cache.keys.shape
        shape = (layers, batch, block_length, *rest)
        return cls(jnp.zeros(shape, cache.keys.dtype), jnp.zeros(shape, cache.keys.dtype))


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What the host learns from a step: ``tokens [B, bl]`` int32, ``done [B]``, and whether the forward just run had
    the block's final tokens as its input (``settled [B]``: the block may be committed as it is)."""

    tokens: np.ndarray
    done: np.ndarray
    settled: np.ndarray


class Programs:
    """Compiles and runs the programs of one model. Not thread-safe; holds weights, never donated state."""

    def __init__(self, model: LLaDA2, runner: ExpertRunner, store: Any):
        self.config: ModelConfig = model.config
        self.dtype = model.dtype
        self.compile_seconds = 0.0
        self._graphdef, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self._leaves = tuple(leaves)
        self._runner = runner
        self._store = store
        self._compiled: dict[tuple, jax.stages.Compiled] = {}

    @property
    def compiled(self) -> int:
        """How many programs have been compiled."""
        return len(self._compiled)

    def weights(self) -> list[Array]:
        """All weight arrays, the experts' included."""
        return jax.tree.leaves((self._leaves, self._store))

    def memory(self, kind: str) -> Any:
        """XLA's memory figures, in bytes, of the last compiled program of a kind ("prefill", "logits", "denoise")."""
        key = [key for key in self._compiled if key[0] == kind][-1]
        return self._compiled[key].memory_analysis()

    def prefill(
        self, cache: KVCache, state: Any, tokens: np.ndarray, start: np.ndarray, valid: np.ndarray, block_length: int
    ) -> tuple[KVCache, Any]:
        """Commits ``tokens [B, T]`` int32 at ``start [B]`` where ``valid [B, T]``; cache and state are donated."""
        window = window_for(cache, int(start.max()))

        def run(leaves, store, cache, state, tokens, start, valid):
            runner = self._runner.for_prefill()
            args = (leaves, store, cache, state, tokens, start, valid, block_length, window)
            _, forward, state = self._forward(runner, *args)
            return cache.write(forward.keys, forward.values, start, valid), state

        key = ("prefill", tokens.shape, block_length, window, cache.keys.shape)
        return self._call(key, run, (2, 3), cache, state, tokens, start, valid)

    def logits(
        self, cache: KVCache, state: Any, tokens: np.ndarray, start: np.ndarray, valid: np.ndarray, block_length: int
    ) -> tuple[Array, Staged, Any]:
        """Logits ``[B, T, V]`` float32 of the tokens, and their keys and values for ``commit``; state is donated."""
        window = window_for(cache, int(start.max()))

        def run(leaves, store, cache, state, tokens, start, valid):
            runner = self._runner.for_prefill()
            args = (leaves, store, cache, state, tokens, start, valid, block_length, window)
            model, forward, state = self._forward(runner, *args)
            return model.head(forward.hidden), Staged(forward.keys, forward.values), state

        key = ("logits", tokens.shape, block_length, window, cache.keys.shape)
        return self._call(key, run, (3,), cache, state, tokens, start, valid)

    def commit(self, cache: KVCache, staged: Staged, start: np.ndarray, valid: np.ndarray) -> KVCache:
        """Writes staged keys and values at ``start [B]`` where ``valid [B, T]``; the cache is donated.

        A program of its own: in the program that read the cache, nothing would order the last layer's reads before
        the write, and XLA would copy the whole cache at every step.
        """

        def run(leaves, store, cache, staged, start, valid):
            return cache.write(staged.keys, staged.values, start, valid)

        return self._call(("commit", valid.shape, cache.keys.shape), run, (2,), cache, staged, start, valid)

    def new_rows(self, program: Program, params: dict, seeds: np.ndarray) -> Rows:
        """Rows of a batch, all inactive until ``enter``; ``seeds [B]`` uint32."""
        shape = (len(seeds), program.block_length)

        def run(leaves, store, params, seeds):
            empty = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.ones(shape[0], bool))
            block = jax.vmap(program.enter, in_axes=(None, 0, 0, 0))(params, *empty)
            zeros = jnp.zeros(shape[0], jnp.int32)
            return Rows(zeros, zeros.astype(bool), seeds, block)

        return self._call(("rows", program, shape, _signature(params)), run, (), params, seeds)

    def enter(self, program: Program, params: dict, rows: Rows, entry: Entry) -> Rows:
        """Lets the rows that ``entry`` names enter their next block; ``rows`` is donated."""

        def run(leaves, store, rows, params, entry):
            fresh = jax.vmap(program.enter, in_axes=(None, 0, 0, 0))(params, entry.tokens, entry.fixed, entry.clean)
            start = jnp.where(entry.rows, entry.start, rows.start)
            return Rows(start, entry.active, rows.seed, _select(entry.rows, fresh, rows.block))

        key = ("enter", program, entry.tokens.shape, _signature(params))
        return self._call(key, run, (2,), rows, params, entry)

    def denoise(
        self, program: Program, params: dict, cache: KVCache, staged: Staged, state: Any, rows: Rows, furthest: int
    ) -> tuple[StepReport, Staged, Any, Rows]:
        """One forward of every active row's block, then its rule; a row whose block is done only gets new keys.

        ``furthest`` is the largest ``start`` among the rows. Staged keys, expert state and rows are donated; the cache
        is only read. Everything large that comes back lies where it lay before: on a GPU, results at changing addresses
        make XLA record its command buffers anew at every step (measured: 2.5 ms of a 13.6 ms step).
        """
        window = window_for(cache, furthest)

        def run(leaves, store, cache, staged, state, rows, params):
            old = rows.block
            valid = jnp.broadcast_to(rows.active[:, None], old.tokens.shape)
            args = (leaves, store, cache, state, old.tokens, rows.start, valid, program.block_length, window)
            model, forward, state = self._forward(self._runner, *args)
            with jax.named_scope("decoding_rule"):
                keys = jax.vmap(_step_key)(rows.seed, rows.start // program.block_length, old.step)
                advance = jax.vmap(program.advance, in_axes=(None, 0, 0, 0))
                block = advance(params, old, model.head(forward.hidden), keys)
                block = _select(rows.active & ~old.done, block, old)
            settled = jnp.all(block.tokens == old.tokens, axis=-1)
            report = jnp.concatenate([block.tokens, block.done[:, None], settled[:, None]], axis=-1, dtype=jnp.int32)
            report = jax.device_put(report, jax.memory.Space.Host)
            # Rows that do not count keep what they had; so every donated buffer is used, and used in place.
            keep = rows.active[None, :, None, None, None]
            staged = Staged(jnp.where(keep, forward.keys, staged.keys), jnp.where(keep, forward.values, staged.values))
            return report, staged, state, dataclasses.replace(rows, block=block)

        key = ("denoise", program, window, cache.keys.shape, _signature(params))
        report, staged, state, rows = self._call(key, run, (3, 4, 5), cache, staged, state, rows, params)
        report = np.asarray(report)
        return StepReport(report[:, :-2], report[:, -2] != 0, report[:, -1] != 0), staged, state, rows

    def _forward(
        self, runner: ExpertRunner, leaves, store, cache, state, tokens, start, valid, block_length: int, window: int
    ) -> tuple[LLaDA2, Forward, Any]:
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))
        experts = Experts(runner, store, state)
        forward = model(tokens, start, valid, cache, experts, block_length=block_length, window=window)
        return model, forward, experts.state

    def _call(self, key: tuple, run: Callable, donate: tuple[int, ...], *args):
        args = (self._leaves, self._store, *args)
        if key not in self._compiled:
            began = time.perf_counter()
            self._compiled[key] = jax.jit(run, donate_argnums=donate).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
        return self._compiled[key](*args)


def window_for(cache: KVCache, start: int) -> int:
    """The bucket of cache rows to look at when committed rows end at ``start``: a power of two, or the whole cache."""
    bucket = SMALLEST_WINDOW
    while bucket < start:
        bucket *= 2
    return min(bucket, cache.keys.shape[2])


def _step_key(seed: Array, block: Array, step: Array) -> Array:
    """The random key of one step: of (seed, block, step) only, so that a batch draws what each sequence draws alone."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), block), step)


def _select(which: Array, new: BlockState, old: BlockState) -> BlockState:
    """Row by row, ``new`` where ``which [B]``, else ``old``."""
    return jax.tree.map(lambda a, b: jnp.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _signature(params: dict) -> tuple:
    """Shapes of the traced parameters (the stop set's length varies)."""
    return tuple(np.shape(leaf) for leaf in jax.tree.leaves(params))
