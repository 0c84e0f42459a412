"""What makes arrays a trace: names, dtypes, shapes, values and the order of rows. ``trace`` says what they mean.

Every check answers with problems in words, all of them, and raises nothing.
"""

from typing import Any

import numpy as np

from oled_jax.retention.record import KV_WRITE, PREFILL, PROMPT

PADDING = 65535  # the expert id of a token that does not count
SPLITS = ("calibration", "evaluation")
LAYOUT = {
    "expert_ids": (("uint16",), "FLTK"),
    "weights": (("float16", "uint8"), "FLTK"),
    "confidence": (("float16",), "FT"),
    "tokens": (("int32",), "FT"),
    "candidates": (("int32",), "FT"),
    "status": (("uint8",), "FT"),
    "sequence": (("int32",), "F"),
    "block": (("int32",), "F"),
    "step": (("int32",), "F"),
    "phase": (("uint8",), "F"),
    "forward": (("int32",), "F"),
}
_ROWS_AT_A_TIME = 1 << 12


def experts_problems(num_experts: Any) -> list[str]:
    """A number of experts that no trace can have."""
    if type(num_experts) is int and 1 <= num_experts <= PADDING:
        return []
    return [f"num_experts is {num_experts!r}; it must be an integer from 1 to {PADDING}"]


def sequences_problems(described: Any) -> list[str]:
    """Descriptions of sequences (the metadata's ``sequences``) that cannot be told apart or have no usable label."""
    if not isinstance(described, list) or not all(isinstance(entry, dict) for entry in described):
        return ["its metadata entry sequences is no list of objects"]
    problems, seen = [], set()
    for place, entry in enumerate(described):
        number = entry.get("sequence")
        if type(number) is not int or number < 0 or number in seen:
            problems.append(f"sequences[{place}] has the number {number!r}; it must be an integer of its own, from 0")
            continue
        seen.add(number)
        if not isinstance(entry.get("task", ""), str):
            problems.append(f"sequences[{place}] has the task {entry['task']!r}; it must be a string")
        if entry.get("split", SPLITS[0]) not in SPLITS:
            problems.append(f"sequences[{place}] has the split {entry['split']!r}; it must be {' or '.join(SPLITS)}")
    return problems


def layout_problems(described: dict[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Arrays that are missing or unknown, have another dtype, or a shape that disagrees with ``expert_ids``."""
    problems = [f"{name} is missing" for name in LAYOUT if name not in described]
    problems += [f"{name!r} is no array of a trace" for name in described if name not in LAYOUT]
    shape = described.get("expert_ids", ("", ()))[1]
    sizes = dict(zip("FLTK", shape, strict=True)) if len(shape) == 4 else None
    if sizes is not None and 0 in sizes.values():
        problems.append(f"expert_ids is empty: its shape is {list(shape)}")
    for name, (dtypes, axes) in LAYOUT.items():
        if name not in described:
            continue
        dtype, shape = described[name]
        if dtype not in dtypes:
            problems.append(f"{name} is {dtype}; it must be {' or '.join(dtypes)}")
        if len(shape) != len(axes):
            problems.append(f"{name} has shape {list(shape)}; it must have {len(axes)} axes: {', '.join(axes)}")
        elif sizes is not None and shape != tuple(sizes[axis] for axis in axes):
            expected = [sizes[axis] for axis in axes]
            problems.append(f"{name} has shape {list(shape)}; expert_ids asks for {expected} ({', '.join(axes)})")
    return problems


def value_problems(arrays: dict[str, np.ndarray], num_experts: int) -> list[str]:
    """Values out of their range and rows out of order; ``arrays`` have the right dtypes and shapes."""
    problems = []
    for name in ("sequence", "block", "step", "forward"):
        _tell(problems, name, arrays[name], arrays[name] < 0, "must not be negative")
    _tell(problems, "phase", arrays["phase"], arrays["phase"] > KV_WRITE, f"must be {PREFILL} to {KV_WRITE}")
    _tell(problems, "status", arrays["status"], arrays["status"] > PROMPT, f"must be 0 to {PROMPT}")
    confidence = arrays["confidence"].astype(np.float32)
    _tell(
        problems, "confidence", confidence, ~(confidence <= 1) | np.isinf(confidence), "must be at most 1, and finite"
    )
    _tell_of_large(problems, arrays, num_experts)
    _tell_of_order(problems, arrays)
    return problems


def _tell(problems: list[str], name: str, values: np.ndarray, wrong: np.ndarray, rule: str, first_row: int = 0) -> bool:
    """Adds a problem if any of ``values`` is ``wrong``; names the first of them."""
    if not wrong.any():
        return False
    where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    place = ", ".join(str(int(i) + (first_row if axis == 0 else 0)) for axis, i in enumerate(where))
    problems.append(f"{name}[{place}] is {values[where]}; it {rule}")
    return True


def _tell_of_large(problems: list[str], arrays: dict[str, np.ndarray], num_experts: int) -> None:
    """Experts and weights, some rows at a time, until one problem of each kind is found."""
    told = set()
    for row in range(0, len(arrays["sequence"]), _ROWS_AT_A_TIME):
        ids, weights = (arrays[name][row : row + _ROWS_AT_A_TIME] for name in ("expert_ids", "weights"))
        padded = ids == PADDING
        checks = [("expert_ids", ids, (ids >= num_experts) & ~padded, f"must be below {num_experts}, or {PADDING}")]
        uneven = padded != padded[:, :1, :, :1]
        checks.append(
            ("expert_ids ", ids, uneven, f"must be {PADDING} in all layers and choices of a token, or in none")
        )
        if weights.dtype == np.float16:
            # As bits, because numpy computes with float16 one by one: 0 to 1 are the bit patterns up to that of 1.
            outside = (weights.view(np.uint16) > 0x3C00) & (weights.view(np.uint16) != 0x8000)
            checks.append(("weights", weights, outside, "must be from 0 to 1"))
        for name, values, wrong, rule in checks:
            if name not in told and _tell(problems, name.strip(), values, wrong, rule, row):
                told.add(name)


def _tell_of_order(problems: list[str], arrays: dict[str, np.ndarray]) -> None:
    forward, prefill = arrays["forward"].astype(np.int64), arrays["phase"] == PREFILL
    back = np.concatenate([[False], np.diff(forward) < 0])
    _tell(problems, "forward", forward, back, "must not be smaller than the one before")
    if back.any():
        return
    begins = np.flatnonzero(np.concatenate([[True], np.diff(forward) > 0]))
    mixed = np.logical_or.reduceat(prefill, begins) & np.logical_or.reduceat(~prefill, begins)
    _tell(
        problems, "forward", forward, np.isin(forward, forward[begins[mixed]]), "holds both prefill and decoding rows"
    )
    order = np.lexsort((arrays["sequence"], forward))
    same = (np.diff(forward[order]) == 0) & (np.diff(arrays["sequence"][order]) == 0)
    repeated = np.zeros(len(forward), bool)
    repeated[order[1:]] = same & ~prefill[order[1:]]
    _tell(problems, "sequence", arrays["sequence"], repeated, "has two decoding rows in one forward")
