"""``oled-jax generate``: prompts in, answers out.

What is wrong with a request is found before the weights are read, wherever that can be told without them. With
``--json`` standard output carries one JSON object per prompt and nothing else; without, the answers' text, drawn while
it is decoded where standard output is a terminal. Progress and the summary go to standard error.

The defaults of a decoding rule are the rule's own: only flags that the user gave are handed to it.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oled_jax.cli.lengths import plan_lengths
from oled_jax.cli.requests import Request, encode_requests, read_requests
from oled_jax.config import ModelConfig
from oled_jax.display import LiveText, summary
from oled_jax.errors import OledError
from oled_jax.progress import ProgressLine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oled_jax.decoding.rule import Rule
    from oled_jax.engine import Engine, Generation

RULE_NAMES = ("threshold", "editing", "levenshtein")

# Flag, type and help of the settings that rules have. None of them has a default here.
_INT_SETTINGS = {
    "block-length": "tokens that are decoded together",
    "steps": "denoising steps that a block's schedule is laid out for",
    "max-post-steps": "forwards spent on edits once no mask is left",
    "max-steps-per-block": "most forwards that one block may take",
    "num-to-transfer": "tokens filled in per forward, at least",
    "minimal-topk": "shortens the schedule of short answers: steps <= gen_length / this",
    "top-k": "sample among the k best tokens",
    "mask-id": "id of the mask token",
    "delete-token-id": "id that deletes a token (LLaDA2.2)",
    "split-token-id": "id that opens a slot (LLaDA2.2)",
}
_FLOAT_SETTINGS = {
    "threshold": "confidence above which a token is filled in",
    "temperature": "0 takes the best token, above 0 samples",
    "top-p": "sample among the best tokens that hold this probability",
}


def add_parser(subparsers: Any) -> None:
    """Adds ``generate`` to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts",
        description="Answers prompts with a LLaDA2.x checkpoint, in the published layout or converted.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--model", required=True, metavar="PATH", help="checkpoint folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="one user turn")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids; needs no tokenizer")
    prompt.add_argument(
        "--prompts-file",
        metavar="FILE.jsonl",
        help='a JSON object per line: "prompt" or "prompt_ids", optionally "id" and "seed"',
    )
    parser.add_argument("--system", metavar="TEXT", help="system turn before the prompt")
    parser.add_argument("--raw", action="store_true", help="encode the text as it is, without the chat template")
    parser.add_argument(
        "--allow-special-ids", action="store_true", help="let a prompt hold the ids of MASK, DELETE and SPLIT"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, and nothing else")

    model = parser.add_argument_group("model")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute in this type (default: as stored)")
    model.add_argument(
        "--expert-bias-dtype",
        choices=("checkpoint", "bfloat16"),
        default="checkpoint",
        help='"bfloat16" rounds the router bias as Hugging Face does',
    )
    model.add_argument("--context-length", type=int, metavar="N", help="positions (default: what the prompts need)")

    decoding = parser.add_argument_group("decoding", "Defaults are the published ones of the decoding rule.")
    decoding.add_argument(
        "--decoding",
        choices=RULE_NAMES,
        help="rule of LLaDA2.0, 2.1 or 2.2 (default: levenshtein for a 2.2 checkpoint, else threshold; configs of 2.0 "
        "and 2.1 are alike)",
    )
    decoding.add_argument("--gen-length", type=int, metavar="N", help="most new tokens (default: 2048, or what fits)")
    decoding.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    setting = functools.partial(decoding.add_argument, default=argparse.SUPPRESS)
    for flag, text in _INT_SETTINGS.items():
        setting(f"--{flag}", type=int, metavar="N", help=text)
    for flag, text in _FLOAT_SETTINGS.items():
        setting(f"--{flag}", type=float, metavar="X", help=text)
    setting(
        "--editing-threshold",
        type=_number_or_off,
        metavar="X",
        help='confidence above which a settled token is replaced; "off" for no edits',
    )
    setting("--eos-id", type=_id_list, metavar="N[,N]", help="ids that end an answer")
    setting("--eos-early-stop", action=argparse.BooleanOptionalAction, help="stop as soon as the answer has ended")


def run(args: argparse.Namespace) -> int:
    """Carries out ``oled-jax generate``; returns the exit code."""
    requests = read_requests(args)
    if args.raw and args.system is not None:
        raise OledError("--system has no place in --raw text: write it into the prompt")
    if not Path(args.model).is_dir():
        raise OledError(f"--model {args.model} is not a folder: give that of a checkpoint")
    config = ModelConfig.from_hf(args.model)
    rule = make_rule(args, config)
    tokenizer = _tokenizer(args.model, any(request.text is not None for request in requests))
    rule = _resolved(rule, args.model, config, tokenizer)
    prompts = encode_requests(
        requests,
        tokenizer,
        vocab_size=config.vocab_size,
        forbidden=() if args.allow_special_ids else _structural_ids(rule),
        raw=args.raw,
        system=args.system,
    )
    context_length, gen_lengths = plan_lengths(
        [(request.where, len(ids)) for request, ids in zip(requests, prompts, strict=True)],
        block_length=rule.block_length,
        max_positions=config.max_position_embeddings,
        context_length=args.context_length,
        gen_length=args.gen_length,
    )
    engine = _load(args, context_length)
    decode = _decoder(tokenizer)
    for index, (request, ids, gen_length) in enumerate(zip(requests, prompts, gen_lengths, strict=True)):
        live, draw = None, None
        if not args.json and sys.stdout.isatty():
            live = LiveText(sys.stdout, decode, mask_id=rule.mask_id, separator=" " if tokenizer is None else "")
            draw = _drawing(live, rule.block_length, len(ids), gen_length)
        generation = engine.generate(
            ids,
            rule,
            gen_length=gen_length,
            seed=request.seed,
            allow_special_ids=args.allow_special_ids,
            on_step=draw,
            on_block=draw,
        )
        if args.json:
            print(json.dumps(_result(index, request, generation, tokenizer)), flush=True)
            continue
        text = decode(generation.tokens)
        print(text, flush=True) if live is None else live.finish(text)
        name = f"{request.where}: " if len(requests) > 1 else ""
        print(name + summary(generation.metrics.to_json(), finished=generation.finished), file=sys.stderr)
    return 0


def make_rule(args: argparse.Namespace, config: ModelConfig) -> "Rule":
    """The decoding rule that the flags describe; OledError for a value out of range or a flag that the rule lacks."""
    from oled_jax.decoding.editing import Editing
    from oled_jax.decoding.levenshtein import Levenshtein
    from oled_jax.decoding.threshold import Threshold

    rules = dict(zip(RULE_NAMES, (Threshold, Editing, Levenshtein), strict=True))
    fields = {name: {field.name for field in dataclasses.fields(rule)} for name, rule in rules.items()}
    name = args.decoding or ("levenshtein" if config.block_routing else "threshold")
    given = {key: value for key, value in vars(args).items() if any(key in known for known in fields.values())}
    foreign = [key for key in given if key not in fields[name]]
    if foreign:
        told = [f"--{key.replace('_', '-')} (it belongs to {_owners(key, fields)})" for key in foreign]
        raise OledError(f"--decoding {name} does not take {', '.join(told)}")
    return rules[name](**given)


def _owners(key: str, fields: dict[str, set[str]]) -> str:
    return " and ".join(name for name, known in fields.items() if key in known)


def _resolved(rule: "Rule", model: str, config: ModelConfig, tokenizer: "PreTrainedTokenizerBase | None") -> "Rule":
    from oled_jax.decoding.rule import resolved
    from oled_jax.special_ids import find_special_ids

    return resolved(rule, find_special_ids(model, config, tokenizer))


def _structural_ids(rule: "Rule") -> set[int]:
    """Ids of a resolved rule that mean something else than text: MASK, and DELETE and SPLIT where the rule has them."""
    fields = {field.name for field in dataclasses.fields(rule)}
    return {getattr(rule, name) for name in fields & {"mask_id", "delete_token_id", "split_token_id"}}


def _tokenizer(model: str, needed: bool) -> "PreTrainedTokenizerBase | None":
    from oled_jax.tokenizer import has_tokenizer, load_tokenizer

    return load_tokenizer(model) if needed or has_tokenizer(model) else None


def _decoder(tokenizer: "PreTrainedTokenizerBase | None") -> Callable[[Sequence[int]], str]:
    """Tokens to what a person reads: text, or the bare ids of a checkpoint without a tokenizer."""
    from oled_jax.tokenizer import decode

    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    return functools.partial(decode, tokenizer)


def _load(args: argparse.Namespace, context_length: int) -> "Engine":
    from oled_jax.engine import Engine

    progress = ProgressLine("loading")
    try:
        return Engine.load(
            args.model,
            dtype=args.dtype,
            context_length=context_length,
            expert_bias_dtype=args.expert_bias_dtype,
            progress=progress,
        )
    finally:
        progress.close()


def _drawing(live: LiveText, block_length: int, num_prompt: int, gen_length: int) -> Callable[[Any], None]:
    """A callback for step and block events alike: shows the positions of the block that belong to the answer."""

    def show(event: Any) -> None:
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


def _id_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id or several, such as 156892,156900") from None


def _number_or_off(text: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor off") from None
