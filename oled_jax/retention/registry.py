"""Policies by name, as command lines and configs spell them: ``lru``, ``lru:tie=load``, ``oled:w=one,rho_in=0.5``."""

import dataclasses
from typing import Any

import numpy as np

from oled_jax.errors import OledError, problem_list
from oled_jax.retention.frequency import Lfu, Lfuda, StaticFrequency
from oled_jax.retention.policy import RetentionPolicy, Table, number_problem
from oled_jax.retention.priority import Oled, Status
from oled_jax.retention.recency import Fifo, Lru, OnDemand, Random

_POLICIES = {policy.name: policy for policy in (OnDemand, Lru, Fifo, Random, Lfu, Lfuda, StaticFrequency, Oled, Status)}


def policy_names() -> tuple[str, ...]:
    """The names that ``policy_by_name`` knows."""
    return tuple(_POLICIES)


def policy_by_name(text: str) -> RetentionPolicy:
    """Reads ``name`` or ``name:parameter=value,parameter=value``; a table's value is the path of a ``.npy`` file.

    OledError for an unknown name, parameter or value; it lists the known ones, and all problems at once.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if name not in _POLICIES:
        raise OledError(f"unknown policy {name!r}: the policies are {', '.join(_POLICIES)}")
    kind = _POLICIES[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            problems.append(f"{part.strip()!r} is not of the form parameter=value")
        elif key not in fields:
            problems.append(f"it has no parameter {key!r}; its parameters are {', '.join(fields)}")
        elif key in values:
            problems.append(f"{key} is given twice")
        else:
            values[key] = _value(fields[key], value, problems)
    if problems:
        raise OledError(problem_list(f"policy {text!r}", problems))
    return kind(**values)


def _value(field: dataclasses.Field, text: str, problems: list[str]) -> Any:
    """``text`` as a value of ``field``; what cannot be one is added to ``problems``. Ranges are the policy's affair."""
    if "choices" in field.metadata:
        if text not in field.metadata["choices"]:
            problems.append(f"{field.name} is {text!r}; it can be {', '.join(field.metadata['choices'])}")
        return text
    if "axes" in field.metadata:
        return _table(field.name, text, problems)
    try:
        value = type(field.default)(text)
    except ValueError:
        value = text
    problems.extend(number_problem(field, value))
    return value


def _table(name: str, path: str, problems: list[str]) -> Table | None:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        problems.append(f"{name} is {path!r}, which cannot be read as a .npy file: {error}")
        return None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
        problems.append(f"{name} is {path!r}, which does not hold one array of numbers")
        return None
    return Table(array, path)
