"""Things that users choose by name and set parameters of: ``fiddler``, ``oled:swaps=4,fill=true``.

A kind is a frozen dataclass whose fields are made by ``parameter``, words or numbers within bounds. ``from_text`` reads
one back from its ``label``. All problems of a text are told at once.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from oled_jax.errors import OledError, problem_list

YES_NO = ("false", "true")


def parameter(default: Any, *, choices: tuple[str, ...] | None = None, low: float = 0, high: float = math.inf) -> Any:
    """A field that users may set: ``choices`` for words, ``low`` to ``high`` (inclusive) for numbers."""
    metadata = {"choices": choices} if choices else {"low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameterised:
    """Parameters of one named thing of a ``noun``; OledError for one out of its range."""

    noun: ClassVar[str]
    name: ClassVar[str]

    def __post_init__(self):
        problems = list(self._problems())
        if problems:
            raise OledError(problem_list(f"{self.noun} {self.name}", problems))

    @property
    def label(self) -> str:
        """The text that ``from_text`` reads back: the name and the parameters that differ from the defaults."""
        changed = [
            f"{field.name}={self._spelled(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def _spelled(self, value: Any) -> str:
        """A value as ``label`` tells it."""
        return str(value)

    def _problems(self) -> Iterable[str]:
        for field in dataclasses.fields(self):
            yield from self._problem(field, getattr(self, field.name))

    def _problem(self, field: dataclasses.Field, value: Any) -> Iterable[str]:
        """At most one sentence: why ``field`` cannot be ``value``."""
        yield from word_or_number_problem(field, value)


Kind = TypeVar("Kind", bound=Parameterised)
Read = Callable[[dataclasses.Field, Any, list[str]], Any]


def read_value(field: dataclasses.Field, given: Any, problems: list[str]) -> Any:
    """``given`` as a value of ``field``; why it cannot be one is added to ``problems``.

    Text stands for a number too, since that is how command lines give them.
    """
    value, kind = given, type(field.default)
    if "choices" not in field.metadata and (isinstance(given, str) or (kind is float and type(given) is int)):
        try:
            value = kind(given)
        except ValueError:
            value = given
    problems.extend(word_or_number_problem(field, value))
    return value


def from_text(text: str, kinds: Mapping[str, type[Kind]], plural: str, read: Read = read_value) -> Kind:
    """Reads ``name`` or ``name:parameter=value,parameter=value``; ``kinds`` by name, ``plural`` what they are called.

    OledError for an unknown name, parameter or value; it lists the known ones, and all problems at once.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    noun = next(iter(kinds.values())).noun
    if name not in kinds:
        raise OledError(f"unknown {noun} {listed(name, kinds, plural)}")
    given: dict[str, str] = {}
    problems: list[str] = []
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            problems.append(f"{part.strip()!r} is not of the form parameter=value")
        elif key in given:
            problems.append(f"{key} is given twice")
        else:
            given[key] = value
    values = values_of(kinds[name], given, problems, read)
    if problems:
        raise OledError(problem_list(f"{noun} {text!r}", problems))
    return kinds[name](**values)


def values_of(kind: type[Parameterised], given: Mapping[str, Any], problems: list[str], read: Read) -> dict[str, Any]:
    """``given`` as values of the fields of ``kind``; what cannot be one is added to ``problems``.

    Ranges of several fields together are the kind's own affair.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    others = f"; its parameters are {', '.join(fields)}" if fields else ", nor any other"
    problems.extend(f"it has no parameter {key!r}{others}" for key in given if key not in fields)
    return {key: read(fields[key], value, problems) for key, value in given.items() if key in fields}


def listed(name: Any, kinds: Mapping[str, Any], plural: str) -> str:
    """A name that is none of ``kinds``, and those that are."""
    return f"{name!r}: the {plural} are {', '.join(kinds)}"


def word_or_number_problem(field: dataclasses.Field, value: Any) -> Iterable[str]:
    """At most one sentence: why ``value`` is no word, or no number, that ``field`` can take."""
    if "choices" in field.metadata:
        if value not in field.metadata["choices"]:
            yield f"{field.name} is {value!r}; it can be {', '.join(field.metadata['choices'])}"
        return
    low, high, whole = field.metadata["low"], field.metadata["high"], isinstance(field.default, int)
    number = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not number or not low <= value <= high:
        yield f"{field.name} is {value!r}; it must be {'an integer' if whole else 'a number'} from {low} to {high}"
