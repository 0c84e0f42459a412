"""Options that several commands share, and what they mean: prompts, model, placement of experts, decoding rule.

The defaults of a decoding rule are the rule's own: only flags that the user gave are handed to it.
"""

import argparse
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from oled_jax.assets import DEMO, model_folder
from oled_jax.config import ModelConfig
from oled_jax.errors import OledError

if TYPE_CHECKING:
    from oled_jax.decoding.rule import Rule

# Options that mean nothing without a budget.
OF_A_BUDGET = ("policy", "form", "staging", "manager")

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


def add_prompt_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Where prompts come from; one of them is ``required``, or none need be given."""
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt", metavar="TEXT", help="one user turn")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids; needs no tokenizer")
    prompt.add_argument(
        "--prompts-file",
        metavar="FILE.jsonl",
        help='a JSON object per line: "prompt" or "prompt_ids", optionally "id", "seed", "task" and "split"',
    )
    parser.add_argument("--system", metavar="TEXT", help="system turn before the prompt")
    parser.add_argument("--raw", action="store_true", help="encode the text as it is, without the chat template")
    parser.add_argument(
        "--allow-special-ids", action="store_true", help="let a prompt hold the ids of MASK, DELETE and SPLIT"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, and how it is loaded."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        type=model_folder,
        help=f'checkpoint folder, or "{DEMO}", the small one that ships with the package',
    )
    model = parser.add_argument_group("model")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute in this type (default: as stored)")
    model.add_argument(
        "--expert-bias-dtype",
        choices=("checkpoint", "bfloat16"),
        default="checkpoint",
        help='"bfloat16" rounds the router bias as Hugging Face does',
    )
    model.add_argument("--context-length", type=int, metavar="N", help="positions (default: what the prompts need)")


def add_placement_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Where experts live; a budget is ``required``, or full residency is the default."""
    group = parser.add_argument_group("experts", "With a budget, all routed experts lie in pinned host memory.")
    group.add_argument(
        "--experts-on-device",
        required=required,
        metavar="N|P%|auto",
        help='experts of each layer in device slots: a number, a share such as 40%% or "auto", the most that fit '
        "(default: all, without a bank)",
    )
    group.add_argument("--policy", help='what stays: "lru", "oled:w=one,rho_in=0.5", ... (default: lru)')
    group.add_argument(
        "--form",
        help='"load-then-compute" (default), or "stream": hits first, then each miss as it lands',
    )
    group.add_argument(
        "--staging", type=int, metavar="N", help="rows for experts that may not stay (default: 4, or what a layer has)"
    )
    group.add_argument("--manager", help='where the policy learns: "device", inside the step (default), or "host"')
    group.add_argument(
        "--routing",
        metavar="TRACE",
        help="trace file whose routing takes the router's place in decoding, for benchmarks: loads and times are those "
        "of the trace, answers mean nothing",
    )


def placement_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``Engine.load`` that the given options for experts stand for."""
    names = ("experts_on_device", *OF_A_BUDGET)
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """The decoding rule and its settings."""
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
