"""The jitted programs of a loaded model: prefill, logits, block entry, one denoising step.

Promises: each program is compiled once per shape, ahead of its first call, and the number of shapes is bounded (a few
token counts, and one per bucket of looked-at cache length); ``compiled`` counts them and ``compile_seconds`` says what
they cost. Weights enter as a flat tuple of leaves (flattening a module costs more than dispatching the step); expert
state and block states are donated and updated in place, and so is the cache where it is
written (prefill and commit; a denoising step only reads it).

A denoising step is ONE program: model, head, decoding rule, and what the retention policy learns from it. What the
host needs comes back as one small array in host memory (``oled_jax.decoding.report``). The decoding loop and its expert
session own every donated array; nothing here keeps one.

Of a model of shapes (``LLaDA2.abstract``) the same programs are compiled and not run, for the devices and memories that
the shapes' shardings name: every method then takes shapes for what lies on the device, and gives those of its results.
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
from oled_jax.decoding.report import Report, packed, record_of, status_after
from oled_jax.decoding.rule import BlockState, Program
from oled_jax.model.experts import ExpertRunner
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.numerics import Array
from oled_jax.model.transformer import Experts, Forward, LLaDA2
from oled_jax.retention.record import DENOISE, KV_WRITE, MASKED, PREFILL, PROMPT

SMALLEST_WINDOW = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The batch on the device, one row per sequence: ``start [B]`` of the active block, ``active [B]``, ``seed [B]``
    uint32, ``sequence [B]`` int32 (its number in this engine), ``status [B, bl]`` int32 of the active block's tokens
    (``oled_jax.retention.record``), and ``block``, a ``BlockState`` with a leading batch axis."""

    start: Array
    active: Array
    seed: Array
    sequence: Array
    status: Array
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


class Programs:
    """Compiles and runs the programs of one model. Not thread-safe; holds weights, never donated state."""

    def __init__(
        self, model: LLaDA2, runner: ExpertRunner, store: Any, on_compile: Callable[[str], None] | None = None
    ):
        """``on_compile(name)`` is called whenever a program is about to be compiled.

        ``model`` and ``store``: arrays, or both ``jax.ShapeDtypeStruct`` leaves with shardings.
        """
        self.config: ModelConfig = model.config
        self.dtype = model.dtype
        self.compile_seconds = 0.0
        self._graphdef, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self._leaves = tuple(leaves)
        self._runner = runner
        self._store = store
        self._abstract = isinstance(self._leaves[0], jax.ShapeDtypeStruct)
        self._on_compile = on_compile
        self._compiled: dict[tuple, jax.stages.Compiled] = {}

    @property
    def compiled(self) -> int:
        """How many programs have been compiled."""
        return len(self._compiled)

    def weights(self) -> list[Array]:
        """All weight arrays, the experts' included."""
        return jax.tree.leaves((self._leaves, self._store))

    def memory(self, kind: str) -> Any:
        """XLA's memory figures, in bytes, of the last compiled program of a kind ("prefill", "denoise", "commit")."""
        return self._last(kind).memory_analysis()

    def text(self, kind: str) -> str:
        """The optimised HLO of the last compiled program of a kind, as XLA prints it; for profiles."""
        return self._last(kind).as_text()

    def prefill(
        self,
        cache: KVCache,
        state: Any,
        tokens: np.ndarray,
        start: np.ndarray,
        valid: np.ndarray,
        sequence: np.ndarray,
        block_length: int,
        *,
        with_logits: bool = False,
    ) -> tuple[Array, Staged, Any, Array | None]:
        """A forward over ``tokens [B, T]`` int32 at ``start [B]`` where ``valid [B, T]``, all of them given.

        ``sequence [B]`` int32: the rows' numbers. Returns the packed report; the tokens' keys and values, for
        ``commit``; the state, which is donated; and the logits ``[B, T, V]`` float32, if asked for.
        """
        window = window_for(cache, int(start.max()))

        def run(leaves, store, cache, state, tokens, start, valid, sequence):
            known = (jnp.full(tokens.shape, -1.0), jnp.full(tokens.shape, PROMPT, jnp.int32))
            runner = self._runner.for_prefill()
            args = (leaves, store, cache, state, tokens, start, valid, known, block_length, window)
            model, forward, state = self._forward(runner, *args)
            zeros = jnp.zeros_like(sequence)
            record = record_of(
                state.forward,
                forward.records,
                valid,
                sequence=sequence,
                block=start // block_length,
                step=zeros,
                phase=zeros + PREFILL,
                of_tokens={
                    "confidence": known[0],
                    "status": known[1],
                    "tokens": tokens,
                    "candidates": jnp.full_like(tokens, -1),
                },
            )
            state = runner.observe(state, record)
            done = zeros > 0
            logits = model.head(forward.hidden) if with_logits else None
            return packed(Report(record, done, done)), Staged(forward.keys, forward.values), state, logits

        key = ("prefill", tokens.shape, block_length, window, cache.keys.shape, with_logits)
        return self._call(key, run, (3,), cache, state, tokens, start, valid, sequence)

    def commit(self, cache: KVCache, staged: Staged, start: np.ndarray, valid: np.ndarray) -> KVCache:
        """Writes staged keys and values at ``start [B]`` where ``valid [B, T]``; the cache is donated.

        A program of its own: in the program that read the cache, nothing would order the last layer's reads before
        the write, and XLA would copy the whole cache.
        """

        def run(leaves, store, cache, staged, start, valid):
            return cache.write(staged.keys, staged.values, start, valid)

        return self._call(("commit", valid.shape, cache.keys.shape), run, (2,), cache, staged, start, valid)

    def new_rows(self, program: Program, params: dict, seeds: np.ndarray, sequence: np.ndarray) -> Rows:
        """Rows of a batch, all inactive until ``enter``; ``seeds [B]`` uint32, ``sequence [B]`` int32."""
        shape = (len(seeds), program.block_length)

        def run(leaves, store, params, seeds, sequence):
            empty = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.ones(shape[0], bool))
            block = jax.vmap(program.enter, in_axes=(None, 0, 0, 0))(params, *empty)
            zeros = jnp.zeros(shape[0], jnp.int32)
            return Rows(zeros, zeros.astype(bool), seeds, sequence, jnp.zeros(shape, jnp.int32), block)

        return self._call(("rows", program, shape, _signature(params)), run, (), params, seeds, sequence)

    def enter(self, program: Program, params: dict, rows: Rows, entry: Entry) -> Rows:
        """Lets the rows that ``entry`` names enter their next block; ``rows`` is donated."""

        def run(leaves, store, rows, params, entry):
            fresh = jax.vmap(program.enter, in_axes=(None, 0, 0, 0))(params, entry.tokens, entry.fixed, entry.clean)
            start = jnp.where(entry.rows, entry.start, rows.start)
            status = jnp.where(fresh.fixed, PROMPT, MASKED)
            status = jnp.where(entry.rows[:, None], status, rows.status)
            block = _select(entry.rows, fresh, rows.block)
            return Rows(start, entry.active, rows.seed, rows.sequence, status, block)

        key = ("enter", program, entry.tokens.shape, _signature(params))
        return self._call(key, run, (2,), rows, params, entry)

    def denoise(
        self,
        program: Program,
        params: dict,
        cache: KVCache,
        staged: Staged,
        state: Any,
        rows: Rows,
        furthest: int,
        *,
        with_logits: bool = False,
    ) -> tuple[Array, Staged, Any, Rows, Array | None]:
        """One denoising step of every active row; staged, state and rows are donated, the cache is only read.

        Rows whose block is done keep it; the keys and values that their tokens leave in ``staged`` are then of final
        tokens. ``furthest`` is the largest start of an active row: the program looks at that much of the cache. The
        first result is the packed report (``oled_jax.decoding.report``), not waited for; the last is the logits ``[B,
        bl, V]`` float32 that the rule saw, if asked for, which makes it another program.

        Everything large that comes back lies where it lay before: on a GPU, results at changing addresses make XLA
        record its command buffers anew at every step (measured: 2.5 ms of a 13.6 ms step).
        """
        window = window_for(cache, furthest)

        def run(leaves, store, cache, staged, state, rows, params):
            old = rows.block
            valid = jnp.broadcast_to(rows.active[:, None], old.tokens.shape)
            known = (old.confidence, rows.status)
            args = (leaves, store, cache, state, old.tokens, rows.start, valid, known, program.block_length, window)
            model, forward, state = self._forward(self._runner, *args)
            with jax.named_scope("decoding_rule"):
                keys = jax.vmap(_step_key)(rows.seed, rows.start // program.block_length, old.step)
                advance = jax.vmap(program.advance, in_axes=(None, 0, 0, 0))
                logits = model.head(forward.hidden)
                block = advance(params, old, logits, keys)
                block = _select(rows.active & ~old.done, block, old)
                status = status_after(old, block, params["mask_id"])
            with jax.named_scope("retention"):
                record = record_of(
                    state.forward,
                    forward.records,
                    valid,
                    sequence=jnp.where(rows.active, rows.sequence, -1),
                    block=rows.start // program.block_length,
                    step=old.step,
                    phase=jnp.where(rows.active, jnp.where(old.done, KV_WRITE, DENOISE), PREFILL),
                    of_tokens={
                        "confidence": block.confidence,
                        "status": status,
                        "tokens": block.tokens,
                        "candidates": block.candidates,
                    },
                )
                state = self._runner.observe(state, record)
            settled = jnp.all(block.tokens == old.tokens, axis=-1)
            report = packed(Report(record, block.done, settled))
            # Rows that do not count keep what they had; so every donated buffer is used, and used in place.
            keep = rows.active[None, :, None, None, None]
            staged = Staged(jnp.where(keep, forward.keys, staged.keys), jnp.where(keep, forward.values, staged.values))
            rows = dataclasses.replace(rows, block=block, status=status)
            return report, staged, state, rows, logits if with_logits else None

        key = ("denoise", program, window, cache.keys.shape, _signature(params), with_logits)
        return self._call(key, run, (3, 4, 5), cache, staged, state, rows, params)

    def _forward(
        self,
        runner: ExpertRunner,
        leaves,
        store,
        cache,
        state,
        tokens,
        start,
        valid,
        known: tuple[Array, Array],
        block_length: int,
        window: int,
    ) -> tuple[LLaDA2, Forward, Any]:
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))
        experts = Experts(runner, store, state, *known)
        forward = model(tokens, start, valid, cache, experts, block_length=block_length, window=window)
        return model, forward, experts.state

    def _last(self, kind: str) -> jax.stages.Compiled:
        key = [key for key in self._compiled if key[0] == kind][-1]
        return self._compiled[key]

    def _call(self, key: tuple, run: Callable, donate: tuple[int, ...], *args):
        args = (self._leaves, self._store, *args)
        if key not in self._compiled:
            if self._on_compile:
                self._on_compile(key[0])
            began = time.perf_counter()
            self._compiled[key] = jax.jit(run, donate_argnums=donate).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
        compiled = self._compiled[key]
        return compiled.out_info if self._abstract else compiled(*args)


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
