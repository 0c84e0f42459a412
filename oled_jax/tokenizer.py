"""Text to token ids and back, with the tokenizer that lies in the checkpoint folder.

Promises: no code from a checkpoint is run, nothing is asked on the terminal, nothing is downloaded. ``tokenizer.json``
decides alone (vocabulary, merges, splitting, added tokens), so the tokenizer class that the folder names does not
matter: published folders name one that exists only as remote code. ``tokenizer_config.json`` and
``chat_template.jinja`` beside it give the special tokens and the chat template.

Deliberately not here: which ids stop or mask (``oled_jax.special_ids``), and streaming of text (``oled_jax.display``).
``transformers`` is imported on first use, since it takes seconds.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from oled_jax.arguments import is_number
from oled_jax.errors import OledError, problem_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"

# What transformers looks at beside it, and passes over in silence where it is no regular file.
_SETTINGS_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

# The literal single-turn form of the family, for a checkpoint that ships no template.
_SYSTEM_TURN = "<role>SYSTEM</role>{system}<|role_end|>"
_USER_TURN = "<role>HUMAN</role>{user}<|role_end|><role>ASSISTANT</role>"
_THINKING_OFF = "detailed thinking off"


def has_tokenizer(path: str | Path) -> bool:
    """Whether the checkpoint folder ``path`` holds a tokenizer."""
    return (Path(path) / TOKENIZER_FILE).exists()


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of the checkpoint folder ``path``, with its chat template where it ships one.

    Raises OledError when the folder holds none, or one that cannot be read.
    """
    folder = Path(path)
    if not has_tokenizer(folder):
        raise OledError(
            f"{folder} holds no {TOKENIZER_FILE}, so text cannot be encoded: --prompt-ids takes token ids without one"
        )
    odd = [name for name in (TOKENIZER_FILE, *_SETTINGS_FILES) if (folder / name).exists()]
    odd = [f"{name} is not a regular file: replace it" for name in odd if not (folder / name).is_file()]
    if odd:
        raise OledError(problem_list(f"the tokenizer in {folder} cannot be read", odd))
    with _quiet():
        from transformers import PreTrainedTokenizerFast

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            if not is_number(tokenizer.model_max_length):
                raise TypeError(f"model_max_length is {tokenizer.model_max_length!r:.80}, expected a number")
            # A setting of a wrong type shows when it is used first; better here than under the first prompt.
            decode(tokenizer, encode_raw(tokenizer, "a"))
            return tokenizer
        except Exception as error:  # the Rust side raises bare Exception for a file that it cannot parse
            raise OledError(
                f"the tokenizer in {folder} cannot be read: {error} "
                f"(looked at {TOKENIZER_FILE}, tokenizer_config.json and the chat template)"
            ) from error


def encode_chat(tokenizer: "PreTrainedTokenizerBase", text: str, *, system: str | None = None) -> list[int]:
    """Token ids of a conversation with one user turn ``text``, up to where the assistant's answer begins.

    Uses the checkpoint's chat template, else the literal form of the family (thinking switched off). Raises OledError
    when the template refuses the conversation, and for a text that is not valid Unicode.
    """
    check_unicode(text, "the text")
    if system is not None:
        check_unicode(system, "the system turn")
    if tokenizer.chat_template is None:
        instruction = _THINKING_OFF if system is None else f"{system}\n{_THINKING_OFF}"
        return encode_raw(tokenizer, _SYSTEM_TURN.format(system=instruction) + _USER_TURN.format(user=text))
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": text})
    try:
        conversation = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise whatever it likes
        raise OledError(f"the checkpoint's chat template fails: {error}; --raw encodes the text without it") from error
    return encode_raw(tokenizer, conversation)


def encode_raw(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of ``text`` as it stands; special tokens spelled out in it become their ids, none are added.

    Raises OledError for text that is not valid Unicode (undecodable bytes of a command line arrive as such).
    """
    check_unicode(text, "the text")
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False, verbose=False)]


def check_unicode(text: str, name: str) -> None:
    """OledError that begins with ``name`` if ``text`` holds a surrogate, which is no character; tells where it is.

    Undecodable bytes of a command line arrive as such, and so does an escape of JSON that lacks its other half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} (counted from 0), {text[error.start]!a}"
        raise OledError(f"{name} is not valid Unicode at {where}: give UTF-8") from None


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Iterable[int]) -> str:
    """Text of ``ids``, special tokens skipped. An id without text (the last rows of the embedding) gives nothing."""
    plain = [int(token) for token in ids]  # the Rust side takes no numpy integers
    return tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what transformers says through its root logger: on import, that it found no PyTorch."""
    logger = logging.getLogger("transformers")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
