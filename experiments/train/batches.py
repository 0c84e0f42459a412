"""Batches of packed segments: a conversation with one answer, or a piece of free text, each on its own block grid.

Promises: a batch follows from the configuration, a seed and the step number alone, so that a resumed run sees what the
uninterrupted one would have seen. A segment is what the engine would hold after generating the right answer: the
prompt's tokens, the answer's, ``<|role_end|>``, then ``<|endoftext|>`` to the end of the block, one at least. It begins
at position 0 with a block, as the engine's grid does, so that the prompt's tail and the answer share one.

Packing: tasks are drawn until they fill their share of the batch, laid into rows longest first, and free text takes the
places left, cut to fit, so that none stays empty unless the text share is 0. What is spent without being asked about is
the fill after an answer: with the default mix, a quarter of all positions.

Deliberately not here: noise and masks, which the training step makes on the device; processes (``prefetch``).
"""

import dataclasses
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from tasks import HELD_OUT, KINDS, TRAIN, draw, kind_named
from text import documents
from tokenizers import Tokenizer
from vocabulary import BEFORE_ANSWER, BEFORE_USER, ENDOFTEXT, ROLE_END, SPECIAL_IDS

from oled_jax.errors import OledError

TEXT = "text"
KIND_NAMES = (TEXT, *KINDS)  # what Batch.kind counts

_CHARACTERS_PER_TOKEN = 8  # to begin with; text with longer pieces on average takes a longer cut
_MOST_DRAWS = 1000


class Batch(NamedTuple):
    """``B`` rows of ``T`` tokens, numpy arrays.

    ``tokens`` int32. ``segment`` int32: 1, 2, ... within a row, 0 where there is none; segments know nothing of each
    other. ``position`` int32, from 0 in each segment. ``answer`` bool: what is to be predicted, which is everything
    after the prompt, or all of a free text. ``kind`` int32: index into ``KIND_NAMES``.
    """

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    answer: np.ndarray
    kind: np.ndarray


@dataclasses.dataclass(frozen=True)
class Mix:
    """``text``: share of the positions that free text has. ``tasks``: kinds and how often each is drawn.

    All of a free text is predicted, so that a share of 0.04 is a fifth of the predicted words already. Frequencies are
    of examples and relative to their sum; a kind that is not named is not drawn. Kinds with short answers are drawn
    more often: an example of theirs has less to be learned from.
    """

    text: float = 0.04
    tasks: tuple[tuple[str, float], ...] = (
        ("copy", 1.0),
        ("reverse", 2.0),
        ("replace", 1.0),
        ("template", 1.0),
        ("record", 1.0),
        ("sort", 3.0),
        ("add", 8.0),
        ("sequence", 4.0),
        ("count", 4.0),
        ("lookup", 2.0),
        ("largest", 3.0),
        ("pick", 2.0),
    )

    def __post_init__(self):
        if not 0 <= self.text <= 1:
            raise OledError(f"text share {self.text} is no share: give 0 to 1")
        for task, frequency in self.tasks:
            kind_named(task)
            if frequency < 0:
                raise OledError(f"frequency of {task} is {frequency}, must not be negative")
        if self.text < 1 and not sum(frequency for _, frequency in self.tasks):
            raise OledError("no task has a frequency above 0: name one, or give a text share of 1")


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """How the level of the tasks rises: from ``start`` at step 0, evenly, to 1 at step ``steps``."""

    start: float = 0.1
    steps: int = 2000

    def level(self, step: int) -> float:
        """The level at ``step``."""
        return 1.0 if step >= self.steps else self.start + (1 - self.start) * step / self.steps


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """All that batches depend on beside seed and step.

    ``tokenizer``: the folder that ``vocabulary`` wrote. ``rows`` of ``length`` tokens; ``block_length`` divides that.
    ``split``: ``tasks.TRAIN``, or ``tasks.HELD_OUT`` for a loss on what is not trained on.
    """

    tokenizer: str
    rows: int
    length: int = 256
    block_length: int = 32
    mix: Mix = Mix()
    curriculum: Curriculum = Curriculum()
    split: str = TRAIN

    def __post_init__(self):
        if self.rows < 1 or self.block_length < 1 or self.length < 1 or self.length % self.block_length:
            raise OledError(
                f"{self.rows} rows of {self.length} tokens in blocks of {self.block_length}: "
                f"give positive numbers, and a length that is a multiple of the block's"
            )
        if self.split not in (TRAIN, HELD_OUT):
            raise OledError(f"split {self.split!r} is unknown: {TRAIN} or {HELD_OUT}")


class Segment(NamedTuple):
    """Tokens of one segment, a multiple of the block length, and how many of them are the prompt."""

    kind: int
    prompt_length: int
    tokens: list[int]


class BatchMaker:
    """Makes the batches of one configuration; reads the library's text once, which takes seconds."""

    def __init__(self, config: BatchConfig):
        self.config = config
        path = Path(config.tokenizer) / "tokenizer.json"
        if not path.is_file():
            raise OledError(f"{path} does not exist: python experiments/train/vocabulary.py {config.tokenizer}")
        self._tokenizer = Tokenizer.from_file(str(path))
        if [self._tokenizer.token_to_id(text) for text in SPECIAL_IDS] != list(SPECIAL_IDS.values()):
            raise OledError(f"{path} has other special tokens than vocabulary.py writes: run it again")
        self._before_user = self._encode(BEFORE_USER)
        self._before_answer = self._encode(BEFORE_ANSWER)
        # From here on a special token spelled out in a text is text.
        self._tokenizer.encode_special_tokens = True
        self._names = [name for name, _ in config.mix.tasks]
        self._frequencies = [frequency for _, frequency in config.mix.tasks]
        self._texts = self._long_texts() if config.mix.text else {}

    def __call__(self, seed: int, step: int) -> Batch:
        """The batch of ``step``, for a run with ``seed``."""
        rng = Random(f"batch/{seed}/{step}")
        rows = self._pack(self._draw_tasks(rng, self.config.curriculum.level(step)))
        if self._texts:
            for row in rows:
                free = self.config.length - sum(len(segment.tokens) for segment in row)
                if free:
                    row.append(self._text(rng, free))
        return self._arrays(rows)

    def task_segment(self, rng: Random, name: str, level: float) -> Segment:
        """An example of a kind as the tokens of prompt, answer and fill."""
        for _ in range(_MOST_DRAWS):
            example = draw(KINDS[name], rng, level, self.config.split)
            prompt = self._before_user + self._encode(example.prompt) + self._before_answer
            tokens = [*prompt, *self._encode(example.answer), SPECIAL_IDS[ROLE_END], SPECIAL_IDS[ENDOFTEXT]]
            tokens += [SPECIAL_IDS[ENDOFTEXT]] * (-len(tokens) % self.config.block_length)
            if len(tokens) <= self.config.length:
                return Segment(KIND_NAMES.index(name), len(prompt), tokens)
        raise OledError(
            f"examples of {name!r} at level {level} do not fit {self.config.length} tokens: give longer rows"
        )

    def _draw_tasks(self, rng: Random, level: float) -> list[Segment]:
        room = round((1 - self.config.mix.text) * self.config.rows * self.config.length)
        segments = []
        while room > 0:
            name = rng.choices(self._names, self._frequencies)[0]
            segments.append(self.task_segment(rng, name, level))
            room -= len(segments[-1].tokens)
        # The one that overshot is kept as often as keeps the share right on average.
        if segments and rng.random() * len(segments[-1].tokens) < -room:
            segments.pop()
        return segments

    def _pack(self, segments: list[Segment]) -> list[list[Segment]]:
        """First fit, longest first. What fits nowhere is left out, which takes a text share of nearly nothing."""
        rows: list[list[Segment]] = [[] for _ in range(self.config.rows)]
        free = np.full(self.config.rows, self.config.length)
        for segment in sorted(segments, key=lambda segment: -len(segment.tokens)):
            row = int(np.argmax(free >= len(segment.tokens)))
            if free[row] >= len(segment.tokens):
                rows[row].append(segment)
                free[row] -= len(segment.tokens)
        return rows

    def _long_texts(self) -> dict[str, list[str]]:
        """Documents by what they are (topic, doc, source), those that fill a row."""
        needed = self.config.length * _CHARACTERS_PER_TOKEN
        texts: dict[str, list[str]] = {}
        for document in documents(self.config.split):
            if len(document.text) >= 2 * needed:
                texts.setdefault(document.name.partition("/")[0], []).append(document.text)
        return texts

    def _text(self, rng: Random, length: int) -> Segment:
        """``length`` tokens of a text, from the beginning of a line on; topics, docstrings and sources alike often."""
        for _ in range(_MOST_DRAWS):
            text = rng.choice(self._texts[rng.choice(list(self._texts))])
            start = text.find("\n", rng.randrange(len(text) - length * _CHARACTERS_PER_TOKEN)) + 1
            tokens = self._encode(text[start : start + length * _CHARACTERS_PER_TOKEN])[:length]
            if len(tokens) == length:
                return Segment(KIND_NAMES.index(TEXT), 0, tokens)
        raise OledError(f"no text of {length} tokens was found: give shorter rows")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _arrays(self, rows: list[list[Segment]]) -> Batch:
        shape = self.config.rows, self.config.length
        batch = Batch(
            np.full(shape, SPECIAL_IDS[ENDOFTEXT], np.int32),
            *(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.bool_, np.int32)),
        )
        for i, row in enumerate(rows):
            start = 0
            for number, segment in enumerate(row, start=1):
                end = start + len(segment.tokens)
                batch.tokens[i, start:end] = segment.tokens
                batch.segment[i, start:end] = number
                batch.position[i, start:end] = np.arange(end - start)
                batch.answer[i, start + segment.prompt_length : end] = True
                batch.kind[i, start:end] = segment.kind
                start = end
        return batch
