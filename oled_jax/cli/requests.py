"""What the user asks for, as token ids: from ``--prompt``, ``--prompt-ids`` or the lines of ``--prompts-file``.

Promises: everything that is wrong with a file of prompts is found before a model is loaded, and told in one message
with line numbers. Reads text files only; knows nothing of models beyond the size of the vocabulary.

A line of a prompts file is a JSON object with ``prompt`` (text) or ``prompt_ids`` (list of token ids), and optionally
``id`` (a string or integer, handed through to the result), ``seed`` (default: that of the command line), and what a
trace says of its sequences: ``task`` (a string) and ``split`` ("calibration" or "evaluation"). Blank lines are skipped.
"""

import argparse
import codecs
import dataclasses
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oled_jax.errors import OledError, problem_list
from oled_jax.tokenizer import check_unicode, encode_chat, encode_raw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED_LIMIT = 2**32
_ID = re.compile(r"-?[0-9]{1,40}")  # a negative one is told with those outside the vocabulary
_LONGEST_ECHO = 80
_KEYS = ("prompt", "prompt_ids", "id", "seed", "task", "split")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt: ``text`` or ``ids``, never both. ``where`` says in messages which one it is."""

    where: str
    text: str | None
    ids: tuple[int, ...] | None
    seed: int
    id: str | int | None = None
    task: str | None = None
    split: str | None = None


def read_requests(args: argparse.Namespace) -> list[Request]:
    """The prompts that the command line names, in order; OledError for what cannot be one."""
    seed = _seed(args.seed, "--seed")
    if args.prompts_file == "":
        raise OledError("--prompts-file is empty: give the path of a file")
    if args.prompts_file is not None:
        return _read_file(Path(args.prompts_file), seed)
    if args.prompt is not None:
        if not args.prompt:
            raise OledError("--prompt is empty: give it some text")
        check_unicode(args.prompt, "--prompt")
        return [Request("the prompt", args.prompt, None, seed)]
    return [Request("the prompt", None, _parse_ids(args.prompt_ids), seed)]


def encode_requests(
    requests: list[Request],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    vocab_size: int,
    forbidden: Collection[int],
    raw: bool,
    system: str | None,
) -> list[list[int]]:
    """Token ids of every prompt. ``tokenizer`` may be None when all of them are ids already.

    ``forbidden``: ids that decoding would fill in or execute. Raises OledError for prompts without a token, with one of
    these, or with ids outside the vocabulary, all of them together.
    """
    if system is not None:
        check_unicode(system, "--system")
    encoded, problems = [], []
    for request in requests:
        if request.ids is not None:
            ids = list(request.ids)
        elif raw:
            ids = encode_raw(tokenizer, request.text)
        else:
            ids = encode_chat(tokenizer, request.text, system=system)
        if not ids:
            problems.append(f"{request.where} has no tokens")
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            problems.append(
                f"{request.where} holds {_some(outside)}, outside the vocabulary of {vocab_size} tokens "
                f"(0 to {vocab_size - 1})"
            )
        meant = [token for token in ids if token in forbidden]
        if meant:
            problems.append(
                f"{request.where} holds {_some(meant)}, which decoding takes as a mask or an edit "
                f"(--allow-special-ids lets it pass)"
            )
        encoded.append(ids)
    if problems:
        raise OledError(problem_list("prompts", problems))
    return encoded


def _some(ids: list[int]) -> str:
    return ", ".join(_cut(str(token)) for token in ids[:5]) + (", ..." if len(ids) > 5 else "")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}..."


def _parse_ids(text: str) -> tuple[int, ...]:
    if not text.strip():
        raise OledError("--prompt-ids is empty: give token ids separated by commas, such as 1,2,3")
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_ID.fullmatch, parts)):
        raise OledError(f"--prompt-ids {_cut(ascii(text))}: give token ids separated by commas, such as 1,2,3")
    return tuple(map(int, parts))


def _read_file(path: Path, seed: int) -> list[Request]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OledError(f"--prompts-file {path} cannot be read: {error.strerror}") from None
    # Without a byte order mark, JSON in wider units gives itself away: its first character is an ASCII one.
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:4]:
        raise OledError(f"--prompts-file {path} is UTF-16 or UTF-32 text, not UTF-8: save it as UTF-8")
    requests, problems = [], []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_parse_line(line, f"{path} line {number}", seed))
        except OledError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise OledError(problem_list(str(path), problems))
    if not requests:
        raise OledError(f"{path} holds no prompts: each line is a JSON object with prompt or prompt_ids")
    return requests


def _parse_line(line: bytes, where: str, seed: int) -> Request:
    try:
        raw: Any = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object)
    except OledError:
        raise
    except UnicodeDecodeError as error:
        raise OledError(f"is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise OledError(f"is not JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:  # nested or numbered beyond what Python reads
        raise OledError(f"cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise OledError("is not a JSON object")
    unknown = [key for key in raw if key not in _KEYS]
    if unknown:
        raise OledError(f"has unknown keys {', '.join(unknown)} (known: {', '.join(_KEYS)})")
    if ("prompt" in raw) == ("prompt_ids" in raw):
        raise OledError("needs exactly one of prompt and prompt_ids")
    for key, value in raw.items():
        if isinstance(value, str):
            check_unicode(value, key)
    text, ids, name = raw.get("prompt"), raw.get("prompt_ids"), raw.get("id")
    if "prompt" in raw and (not isinstance(text, str) or not text):
        raise OledError(f"prompt is {text!r}, expected text that is not empty")
    if "prompt_ids" in raw and (not isinstance(ids, list) or not ids or not all(map(_is_int, ids))):
        raise OledError("prompt_ids is no list of integers with at least one of them")
    if name is not None and not isinstance(name, str) and not _is_int(name):
        raise OledError(f"id is {name!r}, expected a string or an integer")
    seed = _seed(raw.get("seed", seed), "seed")
    return Request(where, text, None if ids is None else tuple(ids), seed, name, **_labels(raw))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; OledError for a key that it has more than once, since readers differ on which of them counts."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise OledError(f"has the key {_cut(ascii(key))} more than once")
        content[key] = value
    return content


def _labels(raw: dict[str, Any]) -> dict[str, str]:
    """Task and split of a line, where it has them."""
    from oled_jax.lab.trace_checks import SPLITS

    task, split = raw.get("task"), raw.get("split")
    if task is not None and (not isinstance(task, str) or not task):
        raise OledError(f"task is {task!r}, expected text that is not empty")
    if split is not None and split not in SPLITS:
        raise OledError(f"split is {split!r}, expected {' or '.join(SPLITS)}")
    return {name: value for name, value in (("task", task), ("split", split)) if value is not None}


def _seed(value: Any, name: str) -> int:
    if not _is_int(value) or not 0 <= value < SEED_LIMIT:
        raise OledError(f"{name} is {_cut(repr(value))}: give an integer of 0 to {SEED_LIMIT - 1}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
