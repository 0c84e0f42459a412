"""The published decoding rules, transcribed line by line in plain Python: the oracle for our programs.

Each function decodes one block and takes ``forward(tokens) -> logits [bl, V]``; it returns the final tokens, the number
of forwards, and the tokens that the last forward saw. Greedy only.
"""

import numpy as np


def greedy(logits):
    """Best token and its float32 softmax probability."""
    logits = logits.astype(np.float32)
    best = logits.max(-1, keepdims=True)
    return logits.argmax(-1), (1 / np.exp(logits - best).sum(-1)).astype(np.float32)


def without(logits, *tokens):
    """The logits with some tokens impossible."""
    logits = logits.copy()
    logits[..., list(tokens)] = -np.inf
    return logits


def top(p, among, count):
    """The ``count`` most confident positions among a set, lowest index first on ties."""
    return set(sorted(among, key=lambda i: (-p[i], i))[:count])


def threshold(forward, block, start, prompt_length, previous, rule, gen_length):
    """Section 5.1. ``previous``: generated tokens before this block."""
    blk, bl, mask = list(block), len(block), rule.mask_id
    steps = min(rule.steps, gen_length // rule.minimal_topk)
    forwards, seen = 0, list(block)
    for s in range(steps):
        act = {i for i in range(bl) if blk[i] == mask}
        if not act:
            break
        seen = list(blk)
        x0, p = greedy(forward(blk))
        forwards += 1
        need = bl // steps + (1 if s < bl % steps else 0)
        hi = {i for i in act if p[i] > np.float32(rule.threshold)}
        take = hi if len(hi) >= need else top(p, act, min(need, len(act)))
        for i in take:
            blk[i] = int(x0[i])
        if rule.eos_early_stop and any(x0[i] in eos_set(rule) for i in take):
            answer = list(previous) + blk[max(0, prompt_length - start) :]
            first = next(i for i, token in enumerate(answer) if token in eos_set(rule))
            if mask not in answer[:first]:
                break
    return blk, forwards, seen


def editing(forward, block, start, prompt_length, rule):
    """Section 5.2, MASK excluded as a candidate."""
    blk, bl, mask = list(block), len(block), rule.mask_id
    post, forwards, seen = 0, 0, list(block)
    while True:
        old = list(blk)
        act = {i for i in range(bl) if old[i] == mask}
        if not act:
            post += 1
        if post > rule.max_post_steps:
            break
        x0, p = greedy(without(forward(old), mask))
        forwards, seen = forwards + 1, old
        fill = set()
        if act:
            hi = {i for i in act if p[i] > np.float32(rule.threshold)}
            fill = hi if len(hi) >= rule.num_to_transfer else top(p, act, min(rule.num_to_transfer, len(act)))
        limit = np.inf if rule.editing_threshold is None else np.float32(rule.editing_threshold)
        free = {i for i in range(bl) if i not in act and start + i >= prompt_length}
        edit = {i for i in free if p[i] > limit and x0[i] != old[i]}
        for i in fill | edit:
            blk[i] = int(x0[i])
        if not act and not edit:
            break
    return blk, forwards, seen


def levenshtein(forward, block, rule):
    """Section 5.3 with the deterministic anti-loop of 5.6; also returns how often that fired."""
    blk, bl, mask = list(block), len(block), rule.mask_id
    delete, split = rule.delete_token_id, rule.split_token_id
    prompt = [token != mask for token in blk]
    orig = [not fixed for fixed in prompt]
    count, post, s, forwards, fired = sum(orig), 0, 0, 0, 0
    states, seen = set(), list(block)
    while True:
        old = list(blk)
        masked = {i for i in range(bl) if old[i] == mask and not prompt[i]}
        n_orig = sum(orig[i] for i in masked)
        n_new = len(masked) - n_orig
        post = post + 1 if n_orig == 0 else 0
        if (not masked and post > rule.max_post_steps) or s >= rule.max_steps_per_block:
            return blk, forwards, seen, fired
        logits = without(forward(old), mask)
        x0, p = greedy(logits)
        forwards, seen = forwards + 1, old
        if s < rule.steps:
            q = count // rule.steps + (1 if s < count % rule.steps else 0) + n_new
            hi = {i for i in masked if p[i] > np.float32(rule.threshold)}
            fill = hi if len(hi) >= q else top(p, masked, min(q, len(masked)))
        else:
            fill = set(masked)
        limit = np.inf if rule.editing_threshold is None else np.float32(rule.editing_threshold)
        edit = {i for i in range(bl) if i not in masked and not prompt[i] and p[i] > limit and x0[i] != old[i]}
        left = {i for i in masked if orig[i]} - fill
        final = (rule.max_post_steps > 0 and post >= rule.max_post_steps) or (
            rule.max_post_steps == 0 and n_orig > 0 and not left
        )
        if final:
            fill = set(masked)
            plain, _ = greedy(without(logits, delete, split))
            x0 = np.where((x0 == delete) | (x0 == split), plain, x0)
        new = [int(x0[i]) if i in fill | edit else old[i] for i in range(bl)]
        if not final and fill | edit:
            ruled_out = logits.copy()
            for _ in range(5):
                changed = [i for i in range(bl) if new[i] != old[i]]
                if tuple(new) not in states or not changed:
                    break
                fired += 1
                i = min(changed, key=lambda j: (p[j], j))
                ruled_out[i, new[i]] = -np.inf
                new[i] = int(ruled_out[i].argmax())
        states.add(tuple(new))
        out, flags = [], []
        for i in range(bl):
            if prompt[i]:
                out, flags = [*out, old[i]], [*flags, False]
            elif new[i] == delete:
                continue
            elif new[i] == split:
                out, flags = [*out, mask, old[i]], [*flags, False, orig[i]]
            else:
                out, flags = [*out, new[i]], [*flags, orig[i]]
        blk = (out + [mask] * bl)[:bl]
        orig = (flags + [False] * bl)[:bl]
        s += 1
        if blk == old and mask not in blk:
            return blk, forwards, seen, fired


def eos_set(rule):
    """The stop ids as a set."""
    return set(rule.eos_id) if isinstance(rule.eos_id, tuple) else {rule.eos_id}
