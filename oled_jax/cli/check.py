"""``oled-jax check``: the same prompts under a budget and fully resident, compared step by step.

Both engines are loaded side by side, so the device must hold all experts and the slots. Without a prompt three are made
up: of a few tokens, of half a context and of nearly a whole one. Exit code 0 if everything lies within the tolerance of
the model's dtype (``oled_jax.comparison``), 1 if not.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

from oled_jax.cli.loading import load_engine
from oled_jax.cli.options import add_decoding_options, add_model_options, add_placement_options, add_prompt_options
from oled_jax.cli.prepare import check_model_folder, prepare
from oled_jax.cli.requests import Request, read_requests
from oled_jax.config import ModelConfig
from oled_jax.display import CompileLine, summary
from oled_jax.errors import OledError
from oled_jax.special_ids import find_special_ids

GEN_LENGTH = 64
CONTEXT = 512
LAST_ID = 1000  # below it, ordinary tokens in every vocabulary of the family, special ones of small ones apart
EXIT_DIFFERENT = 1


def add_parser(subparsers: Any) -> None:
    """Adds ``check`` to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="compare a budget with full residency",
        description="Runs prompts under a budget for experts and fully resident, and compares tokens and logits.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_prompt_options(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, and nothing else")
    add_model_options(parser)
    add_placement_options(parser, required=True)
    add_decoding_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax check``; returns the exit code."""
    import numpy as np

    from oled_jax.comparison import compare

    config = check_model_folder(args)
    requests = made_up_requests(args, config) if _no_prompt(args) else read_requests(args)
    if args.gen_length is None:
        args.gen_length = GEN_LENGTH
    ready = prepare(args, config, requests)
    compiling = CompileLine()
    engine = load_engine(args, ready.context_length, compiling)
    reference = load_engine(args, ready.context_length, compiling, experts_on_device=None)
    dtype, failed = np.dtype(engine.programs.dtype), 0
    for index, (request, ids, gen_length) in enumerate(zip(requests, ready.prompts, ready.gen_lengths, strict=True)):
        options = {"gen_length": gen_length, "seed": request.seed, "allow_special_ids": args.allow_special_ids}
        try:
            outcome, generation = compare(engine, reference, ids, ready.rule, **options)
        finally:
            compiling.clear()
        problems = outcome.problems(dtype)
        failed += bool(problems)
        if args.json:
            metrics = {"problems": problems, "metrics": generation.metrics.to_json()}
            print(json.dumps({"index": index, **dataclasses.asdict(outcome), **metrics}), flush=True)
            continue
        print(f"{request.where} ({len(ids)} tokens): {'; '.join(problems) or 'equal within tolerance'}")
        tokens = "all equal" if outcome.first_difference is None else f"equal up to {outcome.first_difference}"
        first = (
            "" if outcome.differing_step is None else f", first different to the bit in step {outcome.differing_step}"
        )
        print(f"  tokens: {outcome.tokens}, {tokens}")
        print(f"  steps: {outcome.steps_compared} of {outcome.steps} compared{first}")
        print(
            f"  logits ({dtype}): largest difference {outcome.max_logit:.3g}, mean {outcome.mean_logit:.3g}, "
            f"best token equal at {outcome.argmax_equal:.2%} of the positions",
            flush=True,
        )
        print(f"  {summary(generation.metrics.to_json(), finished=generation.finished)}", file=sys.stderr)
    return EXIT_DIFFERENT if failed else 0


def made_up_requests(args: argparse.Namespace, config: ModelConfig) -> list[Request]:
    """Three prompts of random ordinary tokens that leave room for the answer."""
    import numpy as np

    context = args.context_length or min(CONTEXT, config.max_position_embeddings)
    room = context - (args.gen_length or GEN_LENGTH)
    if room < 1:
        raise OledError(
            f"--gen-length {args.gen_length or GEN_LENGTH} leaves no room for a prompt in a context of {context}: "
            "lower it, or raise --context-length"
        )
    rng = np.random.default_rng(args.seed)
    found = find_special_ids(args.model, config, None)
    special = {found.mask_id, *(found.eos_id or ()), found.delete_token_id, found.split_token_id}
    special |= {getattr(args, name, None) for name in ("mask_id", "delete_token_id", "split_token_id")}  # if given
    ordinary = [token for token in range(min(LAST_ID, config.vocab_size // 2)) if token not in special]
    requests = []
    for length in sorted({min(5, room), max(1, room // 2), room}):
        ids = tuple(rng.choice(ordinary, length).tolist())
        requests.append(Request(f"made-up prompt {len(requests) + 1}", None, ids, args.seed))
    return requests


def _no_prompt(args: argparse.Namespace) -> bool:
    return args.prompt is None and args.prompt_ids is None and args.prompts_file is None
