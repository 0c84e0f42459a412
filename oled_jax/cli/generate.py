"""``oled-jax generate``: prompts in, answers out.

What is wrong with a request is found before the weights are read, wherever that can be told without them. With
``--json`` standard output carries one JSON object per prompt and nothing else; without, the answers' text, drawn while
it is decoded where standard output is a terminal, and under a heading each if there are several. Progress and the
summary go to standard error.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oled_jax.cli.loading import load_engine
from oled_jax.cli.options import add_decoding_options, add_model_options, add_placement_options, add_prompt_options
from oled_jax.cli.prepare import check_model_folder, prepare
from oled_jax.cli.requests import Request, read_requests
from oled_jax.display import CompileLine, LiveText, printable, summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oled_jax.decoding.loop import Generation


def add_parser(subparsers: Any) -> None:
    """Adds ``generate`` to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts",
        description="Answers prompts with a LLaDA2.x checkpoint, in the published layout or converted.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_prompt_options(parser, required=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, and nothing else")

    add_model_options(parser)
    add_placement_options(parser)
    add_decoding_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax generate``; returns the exit code."""
    requests = read_requests(args)
    ready = prepare(args, check_model_folder(args), requests)
    rule, tokenizer = ready.rule, ready.tokenizer
    compiling = CompileLine()
    engine = load_engine(args, ready.context_length, compiling)
    decode = _decoder(tokenizer)
    for index, (request, ids, gen_length) in enumerate(zip(requests, ready.prompts, ready.gen_lengths, strict=True)):
        if len(requests) > 1 and not args.json:
            print(("\n" if index else "") + f"==> {printable(request.where)} <==", flush=True)
        live = None
        if not args.json and sys.stdout.isatty():
            live = LiveText(sys.stdout, decode, mask_id=rule.mask_id, separator=" " if tokenizer is None else "")
        compiling.live = live
        draw = _drawing(live, compiling, rule.block_length, len(ids), gen_length)
        try:
            generation = engine.generate(
                ids,
                rule,
                gen_length=gen_length,
                seed=request.seed,
                allow_special_ids=args.allow_special_ids,
                on_step=draw,
                on_block=draw,
            )
        finally:
            compiling.clear()
        if args.json:
            print(json.dumps(_result(index, request, generation, tokenizer)), flush=True)
            continue
        text = decode(generation.tokens)
        print(text, flush=True) if live is None else live.finish(text)
        name = f"{request.where}: " if len(requests) > 1 else ""
        print(name + summary(generation.metrics.to_json(), finished=generation.finished), file=sys.stderr)
    return 0


def _decoder(tokenizer: "PreTrainedTokenizerBase | None") -> Callable[[Sequence[int]], str]:
    """Tokens to what a person reads: text, or the bare ids of a checkpoint without a tokenizer."""
    from oled_jax.tokenizer import decode

    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    return functools.partial(decode, tokenizer)


def _drawing(
    live: LiveText | None, compiling: CompileLine, block_length: int, num_prompt: int, gen_length: int
) -> Callable[[Any], None]:
    """A callback for step and block events alike: shows the positions of the block that belong to the answer."""

    def show(event: Any) -> None:
        compiling.clear()
        if live is None:
            return
        start = event.block * block_length
        live.step(event.block, event.tokens[max(0, num_prompt - start) : num_prompt + gen_length - start])

    return show


def _result(
    index: int, request: Request, generation: "Generation", tokenizer: "PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """What ``--json`` prints for one prompt."""
    from oled_jax.tokenizer import decode

    return {
        "index": index,
        "id": request.id,
        "output_ids": [int(token) for token in generation.tokens],
        "text": None if tokenizer is None else decode(tokenizer, generation.tokens),
        "num_forwards": generation.num_forwards,
        "num_commits": generation.num_commits,
        "finished": generation.finished,
        "metrics": generation.metrics.to_json(),
    }
