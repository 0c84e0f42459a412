"""Generated tasks with one right answer each: what the small models learn, and what they are graded on.

Promises: an example follows from a random generator and a level alone; whether it is for training or held out follows
from a hash of the *problem* (what is asked, whatever the phrasing), equal in every process. So no problem, and hence no
prompt, is on both sides: one problem in eight is held out. Prompts are user turns of the chat format, answers are what
the assistant says, and grading is exact. The level, 0 to 1, moves the largest size of a problem from easy to the full
range; smaller problems stay in at every level, and level 1 is what is graded.

Kinds are calibration or evaluation kinds, for whoever fits something to routing traces and must test it elsewhere.

Distinct problems at level 1: sequence 2,400, add 500,500, every other kind more than 10^8. At level 0 sequence has 20
and add 55. Most have several phrasings.

Deliberately not here: tokens. What a model's vocabulary makes of the text is the business of ``batches``.
"""

import dataclasses
import hashlib
import json
import string
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from words import CITIES, COLORS, DAYS, NAMES, ORDINALS, WORDS

from oled_jax.errors import OledError

TRAIN, HELD_OUT = "train", "held-out"
_HELD_OUT_ONE_IN = 8
_MOST_DRAWS = 10_000  # in a row without an example of the side or a prompt not seen yet


class Problem(NamedTuple):
    """What a generator makes. ``statement`` is the same for every phrasing of the same problem."""

    statement: str
    prompt: str
    answer: str


class Example(NamedTuple):
    """One user turn and the answer to it. ``problem`` decides the side of the split (``split_of``)."""

    task: str
    prompt: str
    answer: str
    problem: str


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of task. ``calibration``: its traces may be fitted to; those of the other kinds are for evaluation."""

    name: str
    calibration: bool
    make: Callable[[Random, float], Problem]

    def sample(self, rng: Random, level: float) -> Example:
        """An example of either side of the split at ``level`` (0 to 1)."""
        problem = self.make(rng, level)
        return Example(self.name, problem.prompt, problem.answer, problem.statement)


def split_of(task: str, problem: str) -> str:
    """``TRAIN`` or ``HELD_OUT``, by a hash of the task's name and the problem."""
    digest = hashlib.blake2b(f"{task}\n{problem}".encode(), digest_size=8).digest()
    return HELD_OUT if int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0 else TRAIN


def draw(kind: Kind, rng: Random, level: float, split: str) -> Example:
    """An example of one side of the split: samples until one is. OledError for a kind that has none there."""
    for _ in range(_MOST_DRAWS):
        example = kind.sample(rng, level)
        if split_of(kind.name, example.problem) == split:
            return example
    raise OledError(f"task {kind.name!r} has no {split} problem at level {level}: raise the level")


def held_out(task: str, count: int, seed: int, level: float = 1.0) -> list[Example]:
    """``count`` held-out examples with distinct prompts, always the same for a seed; more of them begin with fewer.

    Raises OledError for an unknown task, and when the task has fewer such prompts.
    """
    kind = kind_named(task)
    rng = Random(f"held out/{task}/{seed}/{level}")
    found: dict[str, Example] = {}
    repeats = 0
    while len(found) < count:
        example = draw(kind, rng, level, HELD_OUT)
        repeats = repeats + 1 if example.prompt in found else 0
        if repeats > _MOST_DRAWS:
            raise OledError(f"task {task!r} has {len(found)} held-out prompts at level {level}: ask for no more")
        found.setdefault(example.prompt, example)
    return list(found.values())


def grade(example: Example, text: str) -> bool:
    """Whether ``text`` is the answer, white space around it aside."""
    return text.strip() == example.answer.strip()


def kind_named(task: str) -> Kind:
    """The kind called ``task``; OledError, which lists all of them, for one that does not exist."""
    if task not in KINDS:
        raise OledError(f"there is no task {task!r}: the tasks are {', '.join(KINDS)}")
    return KINDS[task]


def _size(rng: Random, level: float, low: int, high: int) -> int:
    """A size from ``low`` to what the level allows of ``high``, evenly."""
    return rng.randint(low, low + round((high - low) * level))


def _number(rng: Random, level: float, digits: int) -> int:
    """A number of at most ``digits`` digits (of one at level 0); each digit more is twice as likely."""
    limit = round(10 ** (1 + (digits - 1) * level))
    lengths = range(1, len(str(limit - 1)) + 1)
    length = rng.choices(lengths, weights=[2**n for n in lengths])[0]
    return rng.randrange(10 ** (length - 1) if length > 1 else 0, min(10**length, limit))


def _copy(rng: Random, level: float) -> Problem:
    items = rng.sample(WORDS, _size(rng, level, 2, 40))
    for i in range(len(items)):
        if rng.random() < 0.1:
            items[i] = str(_number(rng, 1.0, 4))
    text = " ".join(items)
    return Problem(text, rng.choice(("Repeat: {}", "Copy this: {}", "Say exactly: {}")).format(text), text)


def _reverse(rng: Random, level: float) -> Problem:
    items = rng.sample(WORDS, _size(rng, level, 2, 24))
    text = " ".join(items)
    prompt = rng.choice(("Reverse: {}", "Reverse the order of the words: {}")).format(text)
    return Problem(text, prompt, " ".join(reversed(items)))


def _replace(rng: Random, level: float) -> Problem:
    old, new, *items = rng.sample(WORDS, 2 + _size(rng, level, 2, 30))
    for i in rng.sample(range(len(items)), rng.randint(1, max(1, len(items) // 4))):
        items[i] = old
    text = " ".join(items)
    statement = f"{old} {new}: {text}"
    prompt = rng.choice((f"Replace {old} with {new}: {text}", f"Write {new} for every {old}: {text}"))
    return Problem(statement, prompt, " ".join(new if item == old else item for item in items))


_SLOTS: dict[str, Sequence[str]] = {
    "name": NAMES,
    "friend": NAMES,
    "city": CITIES,
    "day": DAYS,
    "color": COLORS,
    "item": WORDS,
    "count": tuple(map(str, range(2, 100))),
    "price": tuple(map(str, range(100, 1000))),
}
_SENTENCES = (
    "Dear {name}, the {item} is ready.",
    "{name} comes to {city} on {day}.",
    "Please send {count} of them to {friend}.",
    "The price of the {item} is {price} euros.",
    "It is {color} and weighs {count} grams.",
    "{friend} will call you on {day}.",
    "We will meet {friend} in {city}.",
    "The {color} one is for {name}.",
    "Bring the {item} back on {day}.",
    "In {city} we have {count} more.",
    "{name} paid {price} euros for it.",
    "The shop in {city} is open on {day}.",
)


def _template(rng: Random, level: float) -> Problem:
    text = " ".join(rng.sample(_SENTENCES, _size(rng, level, 1, 5)))
    used = [slot for _, slot, _, _ in string.Formatter().parse(text) if slot]
    values = {slot: rng.choice(_SLOTS[slot]) for slot in rng.sample(sorted(set(used)), len(set(used)))}
    told = ", ".join(f"{slot} = {value}" for slot, value in values.items())
    prompt = rng.choice(("Fill in {}: {}", "Use {}: {}")).format(told, text)
    return Problem(f"{sorted(values.items())}: {text}", prompt, text.format_map(values))


def _record(rng: Random, level: float) -> Problem:
    fields = rng.sample(sorted(_SLOTS), _size(rng, level, 2, len(_SLOTS)))
    values = {field: rng.choice(_SLOTS[field]) for field in fields}
    told = ", ".join(f"{field} {value}" for field, value in values.items())
    answer = json.dumps({field: int(value) if value.isdigit() else value for field, value in values.items()})
    return Problem(told, rng.choice(("Write as JSON: {}", "Make JSON of this: {}")).format(told), answer)


def _sort(rng: Random, level: float) -> Problem:
    if rng.random() < 0.5:
        items = rng.sample(string.ascii_lowercase, _size(rng, level, 3, 7))
        ordered = sorted(items)
    else:
        numbers = rng.sample(range(10, 100), _size(rng, level, 3, 6))
        items, ordered = list(map(str, numbers)), list(map(str, sorted(numbers)))
    text = " ".join(items)
    return Problem(text, rng.choice(("Sort: {}", "Put in order: {}")).format(text), " ".join(ordered))


def _add(rng: Random, level: float) -> Problem:
    a, b = _number(rng, level, 3), _number(rng, level, 3)
    prompt = rng.choice(("Add {} and {}.", "What is {} plus {}?", "{} + {} =")).format(a, b)
    return Problem(f"{min(a, b)} {max(a, b)}", prompt, str(a + b))


def _sequence(rng: Random, level: float) -> Problem:
    step, first = _size(rng, level, 1, 12), _size(rng, level, 0, 90) + rng.randint(0, 9)
    terms = [first + step * i for i in range(7)]
    if rng.random() < 0.5:
        terms.reverse()
    given, answer = (", ".join(map(str, part)) for part in (terms[:4], terms[4:]))
    return Problem(given, rng.choice(("Continue: {}", "Which three numbers follow: {}")).format(given), answer)


def _count(rng: Random, level: float) -> Problem:
    length = _size(rng, level, 3, 12)
    if rng.random() < 0.5:
        text = " ".join(rng.sample(WORDS, length))
        return Problem(text, rng.choice(("How many words: {}", "Count the words: {}")).format(text), str(length))
    word, *items = rng.sample(WORDS, 1 + length)
    occurrences = rng.randint(1, min(length, 6))
    for i in rng.sample(range(length), occurrences):
        items[i] = word
    text = " ".join(items)
    prompt = rng.choice(("How many times does {} occur: {}", "Count {} in: {}")).format(word, text)
    return Problem(f"{word}: {text}", prompt, str(occurrences))


def _lookup(rng: Random, level: float) -> Problem:
    keys = rng.sample(NAMES, _size(rng, level, 2, 10))
    words = rng.random() < 0.5
    values = rng.sample(WORDS, len(keys)) if words else rng.sample(range(10, 100), len(keys))
    table, key = dict(zip(keys, values, strict=True)), rng.choice(keys)
    told = json.dumps(table) if rng.random() < 0.5 else ", ".join(f"{name} {value}" for name, value in table.items())
    prompt = rng.choice(("What does {1} have? {0}", "{0} Look up {1}.")).format(told, key)
    return Problem(f"{key}: {' '.join(f'{name} {value}' for name, value in table.items())}", prompt, str(table[key]))


def _largest(rng: Random, level: float) -> Problem:
    numbers = rng.sample(range(round(100 + 900 * level)), _size(rng, level, 2, 7))
    text = " ".join(map(str, numbers))
    word, extreme = rng.choice((("largest", max), ("smallest", min)))
    prompt = rng.choice(("Which is the {} number: {}", "Give the {} of {}")).format(word, text)
    return Problem(f"{word}: {text}", prompt, str(extreme(numbers)))


def _pick(rng: Random, level: float) -> Problem:
    items = rng.sample(WORDS, _size(rng, level, 2, 12))
    names = {**dict(zip(ORDINALS, items, strict=False)), "last": items[-1]}
    which = rng.choice(list(names))
    text = " ".join(items)
    prompt = rng.choice(("Which is the {} word: {}", "Give the {} word of {}")).format(which, text)
    return Problem(f"{which}: {text}", prompt, names[which])


KINDS = {
    kind.name: kind
    for kind in (
        Kind("copy", True, _copy),
        Kind("reverse", False, _reverse),
        Kind("replace", False, _replace),
        Kind("template", True, _template),
        Kind("record", False, _record),
        Kind("sort", True, _sort),
        Kind("add", True, _add),
        Kind("sequence", False, _sequence),
        Kind("count", False, _count),
        Kind("lookup", True, _lookup),
        Kind("largest", False, _largest),
        Kind("pick", True, _pick),
    )
}
