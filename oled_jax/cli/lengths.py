"""How many positions the prompts and their answers take, decided before anything is loaded. Pure arithmetic.

The context defaults to what the longest request needs, rounded up to whole blocks, since the cache of keys and values
grows with it.
"""

from collections.abc import Sequence

from oled_jax.errors import OledError, problem_list
from oled_jax.progress import counted

DEFAULT_GEN_LENGTH = 2048


def plan_lengths(
    prompts: Sequence[tuple[str, int]],
    *,
    block_length: int,
    max_positions: int,
    context_length: int | None,
    gen_length: int | None,
) -> tuple[int, list[int]]:
    """The context to load the model with, and for every prompt the most tokens to generate.

    ``prompts``: name for messages and tokens of each. ``max_positions``: the model's limit. ``context_length`` and
    ``gen_length``: what the user asked for, or None. Raises OledError for what does not fit, all prompts together.
    """
    if gen_length is not None and gen_length < 1:
        raise OledError(f"--gen-length is {gen_length}: give at least 1")
    if context_length is not None and not 1 <= context_length <= max_positions:
        raise OledError(f"--context-length is {context_length}: give 1 to {max_positions}, the most this model knows")
    limit = max_positions if context_length is None else context_length
    if block_length > limit:
        raise OledError(f"block_length is {block_length}, larger than the context of {limit} tokens")
    needed, lengths, problems = [], [], []
    for name, tokens in prompts:
        length = min(DEFAULT_GEN_LENGTH, limit - tokens) if gen_length is None else gen_length
        if tokens >= limit:
            problems.append(f"{name} has {counted(tokens, 'token')} and leaves no room in the context of {limit}")
        elif tokens + length > limit:
            problems.append(
                f"{name} has {counted(tokens, 'token')}, and with --gen-length {length} exceeds the context of {limit}"
            )
        lengths.append(length)
        needed.append(-(-(tokens + length) // block_length) * block_length)
    if problems:
        remedy = (
            f"; --context-length may go up to {max_positions}"
            if limit < max_positions
            else "; that is the model's limit"
        )
        raise OledError(problem_list("lengths", problems) + remedy)
    return (min(limit, max(needed)) if context_length is None else context_length), lengths
