"""The tokenizer of the small models: byte-level BPE with the family's special tokens and chat template.

    python experiments/train/vocabulary.py FOLDER

Promises: every text encodes without loss, since each byte is a piece; digits are pieces of their own and join no other;
the files are those of a published folder. The same Python and ``tokenizers`` give the same bytes. It is trained on the
training side of tasks and text only.

The special tokens come first in the vocabulary: their ids do not depend on its size.

Deliberately not here: ids of LLaDA2.2's DELETE and SPLIT; the models trained here follow 2.0.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tasks import KINDS, TRAIN, draw
from text import documents
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from words import CITIES, COLORS, DAYS, NAMES, WORDS

from oled_jax.cli.running import Parser
from oled_jax.errors import OledError
from oled_jax.files import write_whole

ENDOFTEXT, MASK, ROLE_END = "<|endoftext|>", "<|mask|>", "<|role_end|>"
ROLE, END_ROLE = "<role>", "</role>"
SPECIAL_IDS = {text: i for i, text in enumerate((ENDOFTEXT, MASK, ROLE_END, ROLE, END_ROLE))}
SIZE = 1024

# The single-turn form of the family: what stands before the user's words, and between them and the answer.
BEFORE_USER = f"{ROLE}SYSTEM{END_ROLE}detailed thinking off{ROLE_END}{ROLE}HUMAN{END_ROLE}"
BEFORE_ANSWER = f"{ROLE_END}{ROLE}ASSISTANT{END_ROLE}"

CHAT_TEMPLATE = """\
{%- set thinking = "detailed thinking off" -%}
{%- if messages[0].role == "system" -%}
{{- "<role>SYSTEM</role>" + messages[0].content + "\\n" + thinking + "<|role_end|>" -}}
{%- else -%}
{{- "<role>SYSTEM</role>" + thinking + "<|role_end|>" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{{- "<role>HUMAN</role>" + message.content + "<|role_end|>" -}}
{%- elif message.role == "assistant" -%}
{{- "<role>ASSISTANT</role>" + message.content + "<|role_end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<role>ASSISTANT</role>" -}}
{%- endif -%}
"""

# What the pieces are learned from. Without their extra weight, names and days would be spelled out.
_EXAMPLES = 9000  # of each kind
_WORD_WEIGHT = 4000  # times that each word stands alone, with and without a space
_TEXT = 30_000  # characters of a document
_LEAST = 256 + len(SPECIAL_IDS)


def train_tokenizer(corpus: Iterable[str], size: int = SIZE) -> Tokenizer:
    """A tokenizer of ``size`` pieces, special tokens among them. OledError when these and the bytes do not fit."""
    if size < _LEAST:
        raise OledError(f"a vocabulary of {size} has no room for 256 bytes and the special tokens: at least {_LEAST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_IDS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_tokenizer(folder: Path, size: int = SIZE) -> None:
    """Trains a tokenizer on ``training_corpus()`` and writes it to ``folder``: half a minute.

    Raises OledError as ``train_tokenizer`` and ``save_tokenizer`` do.
    """
    save_tokenizer(train_tokenizer(training_corpus(), size), folder)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int = 2048) -> None:
    """Writes a tokenizer to ``folder`` as a published checkpoint has it, template and settings included.

    ``max_length``: the context that the settings tell of. Raises OledError when the folder cannot be written.
    """
    named = {"eos_token": ENDOFTEXT, "pad_token": ENDOFTEXT, "mask_token": MASK}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        **named,
        "additional_special_tokens": [ROLE_END, ROLE, END_ROLE],
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
        "special_tokens_map.json": json.dumps(named, indent=1) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise OledError(f"the tokenizer cannot be written to {folder}: {error.strerror}") from None


def training_corpus(thinned: int = 1) -> Iterator[str]:
    """Tasks and text of the training side, and the words that tasks are made of; always the same.

    ``thinned``: one part in so many, for a tokenizer in a moment.
    """
    for kind in KINDS.values():
        rng = Random(f"vocabulary/{kind.name}")
        for _ in range(_EXAMPLES // thinned):
            example = draw(kind, rng, 1.0, TRAIN)
            # Special tokens are no text to learn pieces from; the words between them are.
            yield from ("SYSTEM", "detailed thinking off", "HUMAN", example.prompt, "ASSISTANT", example.answer)
    for words in (WORDS, NAMES, CITIES, DAYS, COLORS):
        for word in words:
            yield from [word, f" {word}"] * (_WORD_WEIGHT // thinned)
    for document in itertools.islice(documents(TRAIN), 0, None, thinned):
        yield document.text[:_TEXT]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 after a mistake told in one line."""
    parser = Parser(prog="vocabulary", description="Trains the small models' tokenizer and writes it to a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=SIZE, help="pieces of the vocabulary (default %(default)s)")
    try:
        args = parser.parse_args(arguments)
        write_tokenizer(args.folder, args.size)
    except OledError as error:
        print(f"vocabulary: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
