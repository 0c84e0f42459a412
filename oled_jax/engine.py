"""The engine: what a script or a notebook imports. Loads a checkpoint, computes logits, generates.

Promises: every argument is checked before anything runs, and a mistake is one ``OledError``; the same prompt, rule and
seed give the same tokens, alone or in a batch; nothing recompiles once the shapes in use have been seen. An engine does
one thing at a time: what a callback or another thread asks of it meanwhile is an ``OledError``.

Deliberately not here: text (see ``Engine.tokenizer`` and ``oled_jax.tokenizer``) and files (``oled_jax.checkpoint``).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oled_jax.arguments import integer, is_int, token_ids
from oled_jax.assets import model_folder
from oled_jax.checkpoint import open_checkpoint
from oled_jax.checkpoint.layout import DTYPES
from oled_jax.config import ModelConfig
from oled_jax.decoding.chunks import ChunkPlan
from oled_jax.decoding.loop import BlockEvent, Generation, StepEvent, generate
from oled_jax.decoding.programs import Programs
from oled_jax.decoding.rule import Rule, resolved
from oled_jax.decoding.session import ExpertSession
from oled_jax.errors import OledError
from oled_jax.loading import backend, load_weights
from oled_jax.model.experts import ExpertRunner, ExpertWeights
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.transformer import LLaDA2
from oled_jax.offload.budget import choose_budget
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE
from oled_jax.offload.resident import ResidentExperts
from oled_jax.offload.scripted import ScriptedRouting
from oled_jax.planner import Plan
from oled_jax.retention import RetentionPolicy, StepRecord
from oled_jax.retention.manager import RetentionManager
from oled_jax.special_ids import SpecialIds, find_special_ids
from oled_jax.tokenizer import has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oled_jax.lab.trace import Trace

DEFAULT_CONTEXT = 4096


class Engine:
    """A loaded LLaDA2.x model. ``Engine.load`` makes one from a checkpoint folder.

    ``config``: the model's; ``context_length``: positions that a prompt and its answer may take together; ``path``:
    the checkpoint folder; ``programs``: the compiled programs, for whoever counts compilations; ``experts``: the expert
    session, for whoever drives programs directly.
    """

    def __init__(
        self,
        model: LLaDA2,
        experts: dict[int, ExpertWeights],
        *,
        path: str | Path | None = None,
        context_length: int | None = None,
        runner: ExpertRunner | None = None,
        new_manager: Callable[[], RetentionManager] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        """Takes a model with the experts of its MoE layers; ``path``, if any, is where its tokenizer lies.

        ``runner`` says where the experts are (on the device, all of them, by default), ``new_manager`` makes the host's
        retention manager where the runner leaves learning to one, ``on_compile(name)`` is called when a program is
        about to be compiled. Raises OledError for a context length below 1 or beyond the model's
        ``max_position_embeddings``.
        """
        self.config: ModelConfig = model.config
        self.path = None if path is None else Path(path)
        self.context_length = _checked_context(context_length, self.config)
        runner = runner or ResidentExperts()
        self._scripted_block = runner.block_length if isinstance(runner, ScriptedRouting) else None
        self._running = threading.Lock()
        self.experts = ExpertSession(self.config, runner, experts, new_manager)
        self.programs = Programs(model, runner, self.experts.store, on_compile)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | None = None,
        context_length: int | None = None,
        expert_bias_dtype: str = "checkpoint",
        experts_on_device: int | str | None = None,
        policy: str | RetentionPolicy = "lru",
        form: str = LOAD_THEN_COMPUTE,
        staging: int | None = None,
        manager: str = "device",
        routing: "Trace | None" = None,
        on_plan: Callable[[Plan], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ) -> "Engine":
        """Loads a published (Hugging Face) or converted (``oled-convert to-orbax``) checkpoint folder.

        ``path``: that folder, or the string "demo" for the small trained model that ships with the package.

        ``experts_on_device``: None keeps all routed experts on the device; a number N, a share such as "40%" or "auto"
        (the most that fit) keeps all of them in pinned host memory and N of each layer in device slots. Then
        ``policy`` names what stays there (``oled_jax.retention.policy_names``, with parameters as in
        "oled:w=one,rho_in=0.5"); ``form`` is "load-then-compute" or "stream" (``oled_jax.offload.offloaded``);
        ``staging`` rows per layer serve experts that may not stay (default: 4, or all experts if there are fewer);
        ``manager`` says where the policy learns from a forward, inside the jitted step ("device") or between steps
        ("host"): decisions are the same.

        ``routing``: a trace (``oled_jax.lab.read_trace``) whose ids and weights take the router's place in decoding
        forwards, for benchmarks with weights that say nothing about routing: answers are meaningless, loads and times
        are not, and all metrics say "scripted" (``oled_jax.offload.scripted``).

        ``dtype``: "bfloat16" or "float32" for weights and activations; None keeps the checkpoint's. ``context_length``:
        positions to make room for, by default the model's limit but at most 4096. ``expert_bias_dtype``: "checkpoint"
        uses the router's selection bias as stored, "bfloat16" rounds it first, as loading through Hugging Face does
        (as the published 2.0 code is usually run). ``on_plan(plan)`` is called before anything large is allocated,
        ``progress(done_bytes, total_bytes)`` while reading, ``on_compile(name)`` when a program is about to be
        compiled.

        On a CPU, host memory peaks at the arrays that stay there plus less than 2 GB; on CUDA the pool of pinned memory
        grows by doubling and can hold a quarter more. Raises OledError for whatever is wrong with
        the folder or the arguments, all problems of a checkpoint in one message, and PlanError, before anything is
        read, for a budget that does not fit.
        """
        if expert_bias_dtype not in ("checkpoint", "bfloat16"):
            raise OledError(f"expert_bias_dtype is {expert_bias_dtype!r}: give 'checkpoint' or 'bfloat16'")
        if dtype is not None and dtype not in tuple(DTYPES):
            raise OledError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}, or leave it out")
        backend()
        path = model_folder(path)
        with open_checkpoint(path) as checkpoint:
            context_length = _checked_context(context_length, checkpoint.config)
            weight_dtype = DTYPES[dtype] if dtype else checkpoint.weight_dtype
            budget = choose_budget(
                checkpoint.config,
                weight_dtype,
                context_length,
                experts_on_device=experts_on_device,
                policy=policy,
                form=form,
                staging=staging,
                manager=manager,
            )
            runner = budget.runner
            if routing is not None:
                runner = ScriptedRouting.of_trace(runner, routing, checkpoint.config)
            if on_plan:
                on_plan(budget.plan)
            weights = load_weights(
                checkpoint,
                weight_dtype,
                progress,
                expert_bias_dtype=expert_bias_dtype,
                bank=budget.plan.experts_on_device is not None,
            )
        return cls(
            *weights,
            path=path,
            context_length=context_length,
            runner=runner,
            new_manager=budget.new_manager,
            on_compile=on_compile,
        )

    def __repr__(self) -> str:
        c, placed = self.config, self.experts.metrics()
        held = f"{placed.experts_on_device} of {placed.num_experts} experts per layer on the device"
        policy = f", policy {placed.policy}, {placed.form}" if placed.policy else ""
        policy += ", routing scripted" if placed.routing == "scripted" else ""
        return f"<Engine of {self.path}: {c.num_hidden_layers} layers, {held}{policy}, context {self.context_length}>"

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The checkpoint's tokenizer (transformers, never with remote code); OledError when the folder has none."""
        if self.path is None:
            raise OledError("this engine was not loaded from a folder, so it has no tokenizer: pass token ids")
        return load_tokenizer(self.path)

    @cached_property
    def special_ids(self) -> SpecialIds:
        """Mask, EOS, DELETE and SPLIT ids as the checkpoint tells them; None where it does not."""
        tokenizer = self.tokenizer if self.path and has_tokenizer(self.path) else None
        return find_special_ids(self.path, self.config, tokenizer)

    def logits(self, input_ids: np.ndarray | Sequence[Sequence[int]], block_length: int) -> np.ndarray:
        """Logits ``[B, T, V]`` float32 of ``input_ids [B, T]`` under the strict block-causal mask.

        Computed in chunks against the cache, as prefill is. Raises OledError for ids out of range, T beyond the
        context, a block length below 1, or an engine that is running.
        """
        if not isinstance(input_ids, Sequence | np.ndarray) or len(input_ids) == 0:
            raise OledError(f"input_ids is {input_ids!r}: give integers [batch, tokens], at least one of each")
        rows = [token_ids("a row of input_ids", row, self.config.vocab_size) for row in input_ids]
        if len({len(row) for row in rows}) != 1 or not rows[0]:
            raise OledError(
                f"input_ids has rows of {[len(row) for row in rows]} tokens: give rows of one length, not 0"
            )
        ids = np.asarray(rows, np.int32)
        batch, length = ids.shape
        if length > self.context_length:
            raise OledError(f"input_ids holds {length} tokens, more than the context of {self.context_length}")
        self._check_block(block_length)
        plan = ChunkPlan.of(self.config, block_length, batch)
        cache = KVCache.zeros(self.config, batch, plan.cache_length(self.context_length), self.programs.dtype)
        parts = []
        with self._alone():
            numbers = self.experts.begin(batch)
            for start, tokens in plan.chunks(length):
                chunk = np.zeros((batch, tokens), np.int32)
                count = min(tokens, length - start)
                chunk[:, :count] = ids[:, start : start + count]
                valid = np.broadcast_to(np.arange(tokens) < count, (batch, tokens))
                starts = np.full(batch, start, np.int32)
                run = (cache, self.experts.state, chunk, starts, valid, numbers, block_length)
                vector, staged, self.experts.state, logits = self.programs.prefill(*run, with_logits=True)
                self.experts.observe(vector, batch, tokens)
                cache = self.programs.commit(cache, staged, starts, valid)
                parts.append(np.asarray(logits)[:, :count])
        return np.concatenate(parts, axis=1)

    def generate(
        self,
        prompt_ids: Sequence[int],
        rule: Rule,
        *,
        gen_length: int,
        seed: int = 0,
        allow_special_ids: bool = False,
        on_block: Callable[[BlockEvent], None] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        with_logits: bool = False,
    ) -> Generation:
        """Generates up to ``gen_length`` tokens after ``prompt_ids``; see ``generate_batch``."""
        arguments = {"gen_length": gen_length, "seeds": [seed], "allow_special_ids": allow_special_ids}
        listeners = {"on_block": on_block, "on_step": on_step, "on_record": on_record, "with_logits": with_logits}
        return self.generate_batch([prompt_ids], rule, **arguments, **listeners)[0]

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        rule: Rule,
        *,
        gen_length: int,
        seeds: Sequence[int] | None = None,
        allow_special_ids: bool = False,
        on_block: Callable[[BlockEvent], None] | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        with_logits: bool = False,
    ) -> list[Generation]:
        """Decodes prompts of any lengths together, each on its own block grid and with its own seed (default 0).

        ``rule``: ``Threshold``, ``Editing`` or ``Levenshtein``; ids that it leaves out come from the checkpoint.
        ``on_block`` is called when a block is final, ``on_step`` after every denoising forward, ``on_record`` with the
        routing and residency of every forward, prefill included (``oled_jax.retention.StepRecord``). ``with_logits``
        gives step events their logits, by a program of its own. A prompt that holds MASK, DELETE or SPLIT is refused
        unless ``allow_special_ids``, since decoding would fill or execute them.

        Raises OledError, before anything runs, for an empty prompt, ids or seeds out of range, prompts that do not
        fit the context together with ``gen_length``, a block length that the model or the context cannot take, ids
        that neither the rule nor the checkpoint tells, and an engine that is running.
        """
        rule = resolved(rule, self.special_ids)
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise OledError(f"prompts is {prompts!r}: give a sequence of prompts, each a sequence of token ids")
        prompts = [token_ids("a prompt", prompt, self.config.vocab_size) for prompt in prompts]
        if not prompts:
            return []
        if seeds is not None and (not isinstance(seeds, Sequence | np.ndarray) or len(seeds) != len(prompts)):
            raise OledError(f"seeds is {seeds!r}: give one seed for each of the {len(prompts)} prompts")
        seeds = [integer("seed", seed, 0, 2**32 - 1) for seed in (seeds if seeds is not None else [0] * len(prompts))]
        gen_length = integer("gen_length", gen_length, 1, self.context_length)
        for name, callback in (("on_block", on_block), ("on_step", on_step), ("on_record", on_record)):
            if callback is not None and not callable(callback):
                raise OledError(f"{name} is {callback!r}: give a function of one argument, or None")
        self._check_block(rule.block_length)
        if self._scripted_block not in (None, rule.block_length):
            raise OledError(
                f"block_length is {rule.block_length}, and the trace that gives the routing has blocks of "
                f"{self._scripted_block}: give that (--block-length {self._scripted_block})"
            )
        if self.config.block_routing and rule.block_length % self.config.block_size:
            raise OledError(
                f"block_length is {rule.block_length}: this model routes experts by windows of "
                f"{self.config.block_size} tokens, give a multiple of {self.config.block_size}"
            )
        for prompt in prompts:
            self._check_prompt(prompt, rule, gen_length, allow_special_ids)
        with self._alone():
            return generate(
                self.programs,
                self.experts,
                rule,
                prompts,
                seeds,
                gen_length,
                self.context_length,
                on_block,
                on_step,
                on_record,
                with_logits,
            )

    def _alone(self) -> threading.Lock:
        """What to hold while programs run; OledError if it is held.

        The lock itself, since an interrupt cannot strike between taking it and the block that releases it. Two threads
        that ask in the same instant take turns.
        """
        if self._running.locked():
            raise OledError(
                "this engine is running already: wait until it has returned (a callback gets to run before), or load "
                "a second engine"
            )
        return self._running

    def _check_block(self, block_length: int) -> None:
        if not is_int(block_length) or not 1 <= block_length <= self.context_length:
            raise OledError(
                f"block_length is {block_length!r}: give an integer from 1 to the context length, {self.context_length}"
            )

    def _check_prompt(self, prompt: list[int], rule: Rule, gen_length: int, allow_special_ids: bool) -> None:
        if not prompt:
            raise OledError("the prompt is empty: give at least one token")
        if len(prompt) >= self.context_length:
            raise OledError(
                f"the prompt holds {len(prompt)} tokens, and the context {self.context_length}: shorten it or raise "
                f"context_length (--context-length), up to {self.config.max_position_embeddings} for this model"
            )
        if len(prompt) + gen_length > self.context_length:
            raise OledError(
                f"prompt ({len(prompt)}) and gen_length ({gen_length}) take {len(prompt) + gen_length} positions, and "
                f"the context has {self.context_length}: lower gen_length (--gen-length) to at most "
                f"{self.context_length - len(prompt)} or raise context_length (--context-length)"
            )
        for name in ("mask_id", "delete_token_id", "split_token_id"):
            if not allow_special_ids and getattr(rule, name, None) in prompt:
                raise OledError(
                    f"the prompt holds token {getattr(rule, name)}, which decoding takes as {name}: remove it, or pass "
                    f"allow_special_ids=True"
                )


def _checked_context(context_length: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if context_length is None:
        return min(limit, DEFAULT_CONTEXT)
    if not is_int(context_length) or not 1 <= context_length <= limit:
        raise OledError(
            f"context_length is {context_length!r}: give an integer from 1 to the model's "
            f"max_position_embeddings, {limit}"
        )
    return int(context_length)
