"""Things that users choose by name and set parameters of: ``fiddler``, ``oled:swaps=4,fill=true``.

A kind is a frozen dataclass whose fields are made by ``parameter``, words or numbers within bounds. ``from_text`` reads
one back from its ``label``. All problems of a text are told at once.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from oled_jax.errors import OledError, problem_list
from oled_jax.retention.policy import number_problem, parameter

__all__ = ["Parameterised", "from_text", "parameter"]

YES_NO = ("false", "true")


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
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def _problems(self) -> Iterable[str]:
        for field in dataclasses.fields(self):
            yield from _word_or_number_problem(field, getattr(self, field.name))


Kind = TypeVar("Kind", bound=Parameterised)


def from_text(text: str, kinds: Mapping[str, type[Kind]], plural: str) -> Kind:
    """Reads ``name`` or ``name:parameter=value,parameter=value``; ``kinds`` by name, ``plural`` what they are called.

    OledError for an unknown name, parameter or value; it lists the known ones, and all problems at once.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if name not in kinds:
        noun = next(iter(kinds.values())).noun
        raise OledError(f"unknown {noun} {name!r}: the {plural} are {', '.join(kinds)}")
    kind = kinds[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            problems.append(f"{part.strip()!r} is not of the form parameter=value")
        elif not fields:
            problems.append(f"it has no parameter {key!r}, nor any other")
        elif key not in fields:
            problems.append(f"it has no parameter {key!r}; its parameters are {', '.join(fields)}")
        elif key in values:
            problems.append(f"{key} is given twice")
        else:
            values[key] = _value(fields[key], value)
            problems.extend(_word_or_number_problem(fields[key], values[key]))
    if problems:
        raise OledError(problem_list(f"{kind.noun} {text!r}", problems))
    return kind(**values)


def _value(field: dataclasses.Field, text: str) -> Any:
    """``text`` as a value of ``field``, or as it is where it cannot be one."""
    try:
        return text if "choices" in field.metadata else type(field.default)(text)
    except ValueError:
        return text


def _word_or_number_problem(field: dataclasses.Field, value: Any) -> Iterable[str]:
    if "choices" not in field.metadata:
        yield from number_problem(field, value)
    elif value not in field.metadata["choices"]:
        yield f"{field.name} is {value!r}; it can be {', '.join(field.metadata['choices'])}"
