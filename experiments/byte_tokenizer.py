"""A byte-level tokenizer with the chat format of LLaDA2.x, for checkpoints that are made and not trained.

Promises: every text encodes without loss, one token a byte (token id = byte value); the special tokens have their
published ids where the vocabulary is the published one, and follow the bytes where it is smaller. The files are those
of a published folder, with its difficulty: ``tokenizer_config.json`` names no tokenizer class, so that a loader which
asks ``config.json`` instead meets remote code.

Deliberately not here: merges, and text for the remaining ids; they decode to nothing, as the last rows of the published
embedding do.
"""

import dataclasses
import json

from oled_jax.errors import OledError
from oled_jax.special_ids import PUBLISHED_EOS_ID, PUBLISHED_MASK_ID, PUBLISHED_VOCAB_SIZE

ENDOFTEXT, MASK, ROLE_END = "<|endoftext|>", "<|mask|>", "<|role_end|>"

# The ids of the two role tags are not known to us; these two are free.
_PUBLISHED_IDS = {
    ENDOFTEXT: PUBLISHED_EOS_ID,
    MASK: PUBLISHED_MASK_ID,
    ROLE_END: 156900,
    "<role>": 156898,
    "</role>": 156899,
}

CHAT_TEMPLATE = """\
{%- set names = {"user": "HUMAN", "assistant": "ASSISTANT"} -%}
{%- set thinking = "detailed thinking off" -%}
{%- if messages[0].role == "system" -%}
{{- "<role>SYSTEM</role>" + messages[0].content + "\\n" + thinking + "<|role_end|>" -}}
{%- else -%}
{{- "<role>SYSTEM</role>" + thinking + "<|role_end|>" -}}
{%- endif -%}
{%- for message in messages if message.role != "system" -%}
{{- "<role>" + names[message.role] + "</role>" + message.content + "<|role_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<role>ASSISTANT</role>" -}}
{%- endif -%}
"""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that have a meaning: by text, and those of LLaDA2.2's DELETE and SPLIT, which have no text."""

    by_text: dict[str, int]
    delete: int
    split: int


def special_tokens(vocab_size: int) -> SpecialTokens:
    """Ids for a vocabulary of ``vocab_size`` tokens; OledError when it is too small for the bytes and these tokens."""
    if vocab_size >= PUBLISHED_VOCAB_SIZE:
        return SpecialTokens(_PUBLISHED_IDS, delete=156930, split=156931)
    texts = {text: 256 + i for i, text in enumerate(_PUBLISHED_IDS)}
    needed = 256 + len(texts) + 2
    if vocab_size < needed:
        raise OledError(
            f"vocab_size {vocab_size} is too small for the 256 bytes and {len(texts) + 2} special tokens: "
            f"at least {needed}"
        )
    return SpecialTokens(texts, delete=needed - 2, split=needed - 1)


def tokenizer_files(vocab_size: int, max_length: int) -> dict[str, str]:
    """File names and contents of the tokenizer: ``tokenizer.json``, its config, and the chat template."""
    texts = special_tokens(vocab_size).by_text
    added = [
        {"id": i, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, i in sorted(texts.items(), key=lambda item: item[1])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        # The special tokens are entries of the model too: this is what fixes their ids.
        "model": {"type": "BPE", "vocab": _byte_alphabet() | texts, "merges": []},
    }
    config = {
        "model_max_length": max_length,
        "eos_token": ENDOFTEXT,
        "pad_token": ENDOFTEXT,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: itself where printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
