"""Prose and code that every Python installation carries, as documents.

Promises: the language reference as ``pydoc`` shows it, the docstrings of the standard library and its sources, in one
order, the same for every run of one Python release; another release has other text. Nothing is downloaded. A document
is for training or held out by a hash of its name, as the tasks are.

Licence: all of it is part of Python, copyright the Python Software Foundation, under the PSF License Version 2
(https://docs.python.org/3/license.html); a few modules carry a notice of their own in their text.

Deliberately not here: the library's tests and its tables of data (encodings, HTML entities), which are neither prose
nor code, and whatever is installed beside the library.
"""

import inspect
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from tasks import split_of

from oled_jax.errors import OledError

_SHORTEST = 400  # characters; less than that is an empty package or a word of warning
_TRIPLE_QUOTED = re.compile(r"""^[ \t]*[rR]?(\"{3}|'{3})(.*?)\1""", re.MULTILINE | re.DOTALL)
_SKIPPED_FOLDERS = (
    "__phello__",
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
)
_SKIPPED_FILES = ("antigravity.py", "entities.py", "this.py")


class Document(NamedTuple):
    """One text: ``name`` tells what it is, with its kind in front ("topic/", "doc/", "source/")."""

    name: str
    text: str


def documents(split: str) -> Iterator[Document]:
    """The documents of one side of the split (``tasks.TRAIN`` or ``tasks.HELD_OUT``): topics, then module by module.

    A module's docstrings and its source are on the same side. Raises OledError for an installation without the
    library's sources.
    """
    for topic, text in sorted(topics.items()):
        if len(text) >= _SHORTEST and split_of("text", topic) == split:
            yield Document(f"topic/{topic}", text)
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_sources(library))
    if not paths:
        raise OledError(f"{library} holds no sources of the standard library: use a Python that has them")
    for path in paths:
        module = path.relative_to(library).as_posix()
        if split_of("text", module) == split:
            yield from _module_documents(module, path.read_text(encoding="utf-8"))


def _module_documents(module: str, source: str) -> Iterator[Document]:
    prose = "\n\n".join(_docstrings(source))
    for name, text in ((f"doc/{module}", prose), (f"source/{module}", source)):
        if len(text) >= _SHORTEST:
            yield Document(name, text)


def _sources(library: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in files:
            generated = name.startswith("_sysconfigdata")  # differs by platform
            if name.endswith(".py") and name not in _SKIPPED_FILES and not generated:
                yield Path(folder) / name


def _docstrings(source: str) -> list[str]:
    """The triple-quoted strings that begin a line; parsing the library for the true docstrings would take seconds."""
    return [inspect.cleandoc(match[2]) for match in _TRIPLE_QUOTED.finditer(source)]
