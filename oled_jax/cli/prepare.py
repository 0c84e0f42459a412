"""From parsed options to checked requests: everything that can be wrong without the weights is found here."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from oled_jax.assets import DEMO
from oled_jax.cli.lengths import plan_lengths
from oled_jax.cli.options import make_rule
from oled_jax.cli.requests import Request, encode_requests
from oled_jax.config import ModelConfig
from oled_jax.errors import OledError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oled_jax.decoding.rule import Rule


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a command is about to run: per request its token ids and how many tokens it may generate."""

    config: ModelConfig
    rule: "Rule"
    tokenizer: "PreTrainedTokenizerBase | None"
    requests: list[Request]
    prompts: list[list[int]]
    gen_lengths: list[int]
    context_length: int


def check_model_folder(args: argparse.Namespace) -> ModelConfig:
    """The config of ``--model``; OledError when that is no folder of a checkpoint."""
    if not args.model or not Path(args.model).is_dir():  # an empty path would be the working folder
        raise OledError(
            f"--model {args.model or repr(args.model)} is not a folder: give that of a checkpoint, or {DEMO}, "
            "the model that ships"
        )
    return ModelConfig.from_hf(args.model)


def prepare(args: argparse.Namespace, config: ModelConfig, requests: list[Request]) -> Prepared:
    """Resolves rule, ids and lengths of ``requests``; OledError for what is wrong with any of them."""
    if args.raw and args.system is not None:
        raise OledError("--system has no place in --raw text: write it into the prompt")
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
    return Prepared(config, rule, tokenizer, requests, prompts, gen_lengths, context_length)


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
