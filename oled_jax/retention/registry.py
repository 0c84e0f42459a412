"""Policies by name, as command lines and configs spell them: ``lru``, ``lru:tie=load``, ``oled:w=one,rho_in=0.5``.

A TOML file lists several, each with its parameters as they are called everywhere else:

    [[policy]]
    name = "oled"
    w = "one"
    rho_in = 0.5

    [[policy]]
    name = "static-frequency"
    counts = "counts.npy"     # beside the TOML file, unless the path is absolute
"""

import dataclasses
import math
import os
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.errors import OledError, problem_list
from oled_jax.files import open_regular, read_bytes
from oled_jax.parameters import from_text, listed, read_value, values_of
from oled_jax.retention.frequency import Lfru, Lfu, Lfuda, LfudaConf, LfuInCache, StaticFrequency
from oled_jax.retention.policy import RetentionPolicy, Table
from oled_jax.retention.priority import Oled, Status
from oled_jax.retention.published import Dali, Fiddler, FreeToken, HybriMoe, MixtralLru
from oled_jax.retention.recency import Fifo, Lru, OnDemand, Random
from oled_jax.retention.s3fifo import S3Fifo
from oled_jax.retention.static import StaticBlock, StaticFront, StaticUniform
from oled_jax.retention.steps import Boundary, OledSteps
from oled_jax.retention.tide import Interval, MixtralTide, Tide, TidePaper

_POLICIES = {
    policy.name: policy
    for policy in (
        *(OnDemand, Lru, Fifo, Random, Lfu, LfuInCache, Lfru, Lfuda, LfudaConf, S3Fifo),
        *(StaticFrequency, StaticUniform, StaticFront, StaticBlock),
        *(Tide, Interval, TidePaper, MixtralTide, MixtralLru, HybriMoe, Fiddler, Dali, FreeToken),
        *(Oled, OledSteps, Boundary, Status),
    )
}

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def policy_names() -> tuple[str, ...]:
    """The names that ``policy_by_name`` knows."""
    return tuple(_POLICIES)


def policy_by_name(text: str) -> RetentionPolicy:
    """Reads ``name`` or ``name:parameter=value,parameter=value``; a table's value is the path of a ``.npy`` file.

    OledError for an unknown name, parameter or value; it lists the known ones, and all problems at once.
    """
    return from_text(text, _POLICIES, "policies", partial(_value, Path()))


def policies_from_toml(path: str | Path) -> list[RetentionPolicy]:
    """The policies that a TOML file lists under ``[[policy]]``, in its order.

    OledError where the file cannot be read, lists none, or holds anything else; and, all at once, for every unknown
    name, parameter or value in it.
    """
    if path == "":
        raise OledError("the path of the file of policies is empty: give a .toml file")
    try:
        content = tomllib.loads(read_bytes(Path(path)).decode())
    except OSError as error:
        raise OledError(f"{path} cannot be read: {error.strerror}") from None
    except (RecursionError, ValueError) as error:  # of TOML or of UTF-8
        raise OledError(f"{path} is not TOML: {' '.join(str(error).split())}") from None
    entries, problems = content.pop("policy", None), []
    if content:
        problems.append(f"it holds {', '.join(map(repr, content))}, which means nothing here")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        problems.append('it lists no policies: give each as a table [[policy]] with name = "..." and its parameters')
        entries = []
    policies = []
    for place, entry in enumerate(entries, 1):
        found: list[str] = []
        policy = _from_entry(dict(entry), Path(path).parent, found)
        problems.extend(f"policy {place} ({entry.get('name', 'without a name')}): {problem}" for problem in found)
        policies.append(policy)
    if problems:
        raise OledError(problem_list(str(path), problems))
    return policies


def _from_entry(entry: dict[str, Any], folder: Path, problems: list[str]) -> RetentionPolicy | None:
    name = entry.pop("name", None)
    if not isinstance(name, str) or name not in _POLICIES:
        problems.append(f"unknown policy {listed(name, _POLICIES, 'policies')}")
        return None
    parameters = values_of(_POLICIES[name], entry, problems, partial(_value, folder))
    if problems:
        return None
    try:
        return _POLICIES[name](**parameters)
    except OledError as error:
        problems.append(str(error).partition(": ")[2])
        return None


def _value(folder: Path, field: dataclasses.Field, given: Any, problems: list[str]) -> Any:
    """``read_value``, for tables as well; their paths are relative to ``folder``."""
    if "axes" in field.metadata:
        return _table(field.name, given, folder, problems)
    return read_value(field, given, problems)


def _table(name: str, given: Any, folder: Path, problems: list[str]) -> Table | None:
    if not isinstance(given, str) or not given:
        problems.append(f"{name} is {given!r}; give the path of a .npy file")
        return None
    path = folder / given
    try:
        return Table(_read_array(path), str(path))
    except OSError as error:
        reason: Any = error.strerror or error
    except Exception as error:  # numpy raises a dozen kinds for a header that is damaged
        reason = " ".join(str(error).split()) or "its header is damaged"
    problems.append(f"{name} is {given!r}, which cannot be read as a .npy file: {reason}")
    return None


def _read_array(path: Path) -> np.ndarray:
    """The numbers in a ``.npy`` file; nothing is allocated that the file is too short for.

    Raises OSError for what is no regular file, and whatever numpy does for what is no ``.npy`` file.
    """
    with open(open_regular(path), "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:  # a later one is for field names, which no table has
            raise ValueError(f"its format version is {version[0]}.{version[1]}, expected 1.0 or 2.0")
        shape, _, dtype = _HEADERS[version](file)
        if dtype.kind not in "iuf":
            raise ValueError(f"it does not hold one array of numbers but {dtype}")
        claimed, held = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
        if claimed > held or any(size < 0 for size in shape):
            raise ValueError(f"its header claims the shape {list(shape)} of {dtype}, but {held:,} bytes of data follow")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
