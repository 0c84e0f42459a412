"""The decoding loop: prompts in, generations out; any number of sequences, each on its own block grid.

Promises: a sequence in a batch gives the tokens that it gives alone (in float32; in bfloat16 up to what a different
matrix shape rounds). Full prompt blocks are prefilled in chunks and committed; the partial tail shares its block with
the first generated tokens and is neither committed early nor edited. A block is committed only when the last forward
that wrote its KV had its final tokens as input; otherwise it is run once more.

The host sees one small report per step. A sequence that has finished stays in the batch as a row that does not count.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from oled_jax.decoding.chunks import ChunkPlan
from oled_jax.decoding.programs import Entry, Programs, Staged
from oled_jax.decoding.report import Report
from oled_jax.decoding.rule import Rule, eos_ids
from oled_jax.decoding.sequence import ActiveSequence, Phase
from oled_jax.decoding.session import ExpertSession
from oled_jax.metrics import ExpertMetrics, GenerationMetrics
from oled_jax.model.kv_cache import KVCache
from oled_jax.retention.record import StepRecord


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """After a denoising forward: ``tokens [bl]`` int32 of the block of absolute index ``block``, which starts at
    position ``block_start``; its first ``num_prompt`` tokens belong to the prompt; ``step`` counts from 0. The rule saw
    ``logits [bl, V]`` float32 (only if they were asked for)."""

    sequence: int
    block: int
    block_start: int
    num_prompt: int
    step: int
    tokens: np.ndarray
    logits: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class BlockEvent:
    """A block is final: its ``tokens [bl]`` int32, which start at position ``block_start``, and the forwards it took.

    The first ``num_prompt`` tokens belong to the prompt; the last block may reach beyond gen_length or an EOS, where
    ``Generation.tokens`` is cut.
    """

    sequence: int
    block: int
    block_start: int
    num_prompt: int
    tokens: np.ndarray
    num_forwards: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """``tokens``: generated ids, at most gen_length, cut after the first EOS (inclusive). ``num_forwards``: denoising
    forwards as the reference counts them; ``num_commits``: forwards that only rewrote a block's KV. ``finished``: an
    EOS ended it."""

    tokens: list[int]
    num_forwards: int
    num_commits: int
    finished: bool
    metrics: GenerationMetrics


def generate(
    programs: Programs,
    experts: ExpertSession,
    rule: Rule,
    prompts: list[Sequence[int]],
    seeds: list[int],
    gen_length: int,
    context_length: int,
    on_block: Callable[[BlockEvent], None] | None,
    on_step: Callable[[StepEvent], None] | None,
    on_record: Callable[[StepRecord], None] | None,
    with_logits: bool,
) -> list[Generation]:
    """Decodes ``prompts`` together under a resolved ``rule``.

    The caller has validated everything: prompts are not empty, ids are in range, everything fits the context.
    """
    sequences = [ActiveSequence(prompt, rule, gen_length) for prompt in prompts]
    batch = 1 << (len(prompts) - 1).bit_length()  # powers of two bound the number of compiled shapes
    program, params = rule.program(), rule.params(gen_length, programs.config.vocab_size)
    clock = _Clock(programs)
    numbers = experts.begin(batch, on_record)

    cache = _prefill(programs, experts, sequences, numbers, context_length)
    prefill_seconds = clock.lap()

    padded_seeds = np.asarray(seeds + [0] * (batch - len(seeds)), np.uint32)
    rows = programs.new_rows(program, params, padded_seeds, numbers)
    staged = Staged.zeros(cache, program.block_length)
    running, changed = sequences, True
    while running:
        if changed:
            rows = programs.enter(program, params, rows, _entry(sequences, batch))
        furthest = max(sequence.start for sequence in running)
        starts = np.asarray([sequence.start for sequence in sequences] + [0] * (batch - len(sequences)), np.int32)
        arguments = (program, params, cache, staged, experts.state, rows, furthest)
        vector, staged, experts.state, rows, logits = programs.denoise(*arguments, with_logits=with_logits)
        logits = None if logits is None else np.asarray(logits)
        report = experts.observe(vector, batch, program.block_length)
        tokens = report.record.routing.tokens.reshape(batch, -1)
        for index, sequence in enumerate(sequences):
            if sequence.phase is not Phase.FINISHED:
                of_row = None if logits is None else logits[index]
                _take(sequence, index, tokens[index], of_row, report, on_block, on_step)
        moved = np.asarray([s.entering for s in sequences] + [False] * (batch - len(sequences)))
        if moved.any():
            valid = np.broadcast_to(moved[:, None], tokens.shape)
            cache = programs.commit(cache, staged, starts, valid)
        still = [sequence for sequence in sequences if sequence.phase is not Phase.FINISHED]
        changed = len(still) < len(running) or any(sequence.entering for sequence in still)
        running = still
    decode_seconds = clock.lap()
    about_all = (len(prompts), prefill_seconds, decode_seconds, clock, experts.metrics())
    return [_generation(sequence, *about_all) for sequence in sequences]


def _take(
    sequence: ActiveSequence,
    index: int,
    tokens: np.ndarray,
    logits: np.ndarray | None,
    report: Report,
    on_block,
    on_step,
) -> None:
    """Hands one row of a step's report to its sequence, and tells the listeners."""
    denoising = sequence.phase is Phase.DENOISE
    complete = sequence.consume(tokens, bool(report.done[index]))
    if denoising and on_step:
        where = (sequence.block, sequence.start, sequence.prompt_in_block, sequence.block_forwards - 1)
        on_step(StepEvent(index, *where, tokens, logits))
    if complete:
        if on_block:
            where = (sequence.block, sequence.start, sequence.prompt_in_block)
            on_block(BlockEvent(index, *where, tokens, sequence.block_forwards))
        sequence.leave_block(bool(report.settled[index]))


def _entry(sequences: list[ActiveSequence], batch: int) -> Entry:
    """The rows that enter a block now, and which rows count from here on."""
    length = sequences[0].rule.block_length
    entry = Entry(
        rows=np.zeros(batch, bool),
        start=np.zeros(batch, np.int32),
        tokens=np.zeros((batch, length), np.int32),
        fixed=np.zeros((batch, length), bool),
        clean=np.ones(batch, bool),
        active=np.zeros(batch, bool),
    )
    for index, sequence in enumerate(sequences):
        entry.active[index] = sequence.phase is not Phase.FINISHED
        if sequence.entering and entry.active[index]:
            sequence.entering = False
            entry.rows[index] = True
            entry.start[index] = sequence.start
            entry.tokens[index] = sequence.block_tokens
            entry.fixed[index, : sequence.prompt_in_block] = True
            entry.clean[index] = sequence.clean
    return entry


def _prefill(
    programs: Programs,
    experts: ExpertSession,
    sequences: list[ActiveSequence],
    numbers: np.ndarray,
    context_length: int,
) -> KVCache:
    """Commits the full blocks of all prompts; returns the cache."""
    block_length, batch = sequences[0].rule.block_length, len(numbers)
    plan = ChunkPlan.of(programs.config, block_length, batch)
    cache = KVCache.zeros(programs.config, batch, plan.cache_length(context_length), programs.dtype)
    for start, tokens in plan.chunks(max(sequence.start for sequence in sequences)):
        chunk = np.zeros((batch, tokens), np.int32)
        valid = np.zeros((batch, tokens), bool)
        for index, sequence in enumerate(sequences):
            rows = sequence.tokens[start : min(start + tokens, sequence.start)]
            chunk[index, : len(rows)] = rows
            valid[index, : len(rows)] = True
        starts = np.full(batch, start, np.int32)
        run = (cache, experts.state, chunk, starts, valid, numbers, block_length)
        vector, staged, experts.state, _ = programs.prefill(*run)
        cache = programs.commit(cache, staged, starts, valid)
        experts.observe(vector, batch, tokens)
    return cache


class _Clock:
    """Wall-clock laps without the time that compiling took."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._compiled_before = self._compiled = programs.compile_seconds
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, compilation excluded."""
        now, compiled = time.perf_counter(), self._programs.compile_seconds
        lap = now - self._began - (compiled - self._compiled)
        self._began, self._compiled = now, compiled
        return lap

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation since the start."""
        return self._programs.compile_seconds - self._compiled_before


def _generation(
    sequence: ActiveSequence,
    batch: int,
    prefill_seconds: float,
    decode_seconds: float,
    clock: _Clock,
    experts: ExpertMetrics,
) -> Generation:
    answer = sequence.answer()
    metrics = GenerationMetrics(
        prompt_tokens=sequence.prompt_length,
        generated_tokens=len(answer),
        num_forwards=sequence.num_forwards,
        num_commits=sequence.num_commits,
        num_blocks=sequence.block - sequence.first_block + 1,
        masks_left=int(np.sum(answer == sequence.rule.mask_id)),
        batch_size=batch,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        compile_seconds=clock.compile_seconds,
        experts=experts,
    )
    finished = bool(np.isin(answer[-1:], eos_ids(sequence.rule)).any())
    return Generation(answer.tolist(), sequence.num_forwards, sequence.num_commits, finished, metrics)
