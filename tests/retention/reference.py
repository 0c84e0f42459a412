"""The same policies for one layer in plain Python, written from their definitions: sets, dictionaries and floats.

An oracle answers ``value(e, event)`` (what is kept: larger stays, over everything), ``entry(e, event)`` (who is
admitted first) and learns in ``after``. Only weights and confidences that are small fractions are fed to it, so that
its floats are exact.
"""

from typing import NamedTuple


class Event(NamedTuple):
    """One step of one layer: ``counts`` maps wanted experts to token counts; the token lists hold one (row, status,
    confidence, {expert: weight}) per token that counts, as known before and after sampling."""

    index: int
    prefill: bool
    counts: dict
    before: list
    after: list
    sequence: list
    block: list
    deciding: list
    step: list
    phase: list


def protect_step(resident, wanted, capacity, eviction, admission, bypass=lambda new, old: False):
    """Candidates in admission order take free slots, then the slots of victims in eviction order."""
    resident, admitted, evicted = set(resident), set(), set()
    victims = [e for e in eviction if e in resident and e not in wanted]
    for new in (e for e in admission if e in wanted and e not in resident):
        if len(resident) - len(evicted) + len(admitted) < capacity:
            admitted.add(new)
        elif victims and not bypass(new, victims[0]):
            evicted.add(victims.pop(0))
            admitted.add(new)
        else:
            break
    return admitted, evicted


def select_step(resident, wanted, capacity, descending):
    """The first ``capacity`` of residents and fetched, in descending order."""
    kept = set([e for e in descending if e in resident or e in wanted][:capacity])
    return kept - set(resident), set(resident) - kept


class Oracle:
    """Recency and ties; ``tie`` is "id", "load" or a dictionary from expert to a random number."""

    def __init__(self, experts, tie="id"):
        self.experts, self.tie = range(experts), tie
        self.last, self.load = {}, {}

    def tie_key(self, e, event):
        if self.tie == "id":
            return (-e,)
        if self.tie == "load":
            return (event.counts.get(e, self.load.get(e, 0)), -e)
        return (self.tie[e], -e)

    def used(self, e, event):
        return event.index if e in event.counts else self.last.get(e, -1)

    def entry(self, e, event):
        return (event.counts.get(e, 0), *self.tie_key(e, event))

    def bypass(self, event):
        return lambda new, old: False

    def step(self, resident, event, capacity, mode):
        self.resident = set(resident)
        stay = sorted(self.experts, key=lambda e: self.value(e, event))
        enter = sorted(self.experts, key=lambda e: self.entry(e, event), reverse=True)
        if mode == "protect":
            return protect_step(resident, event.counts, capacity, stay, enter, self.bypass(event))
        return select_step(resident, event.counts, capacity, stay[::-1])

    def after(self, event, admitted, evicted):
        self.learn(event, admitted, evicted)
        for e, n in event.counts.items():
            self.last[e], self.load[e] = event.index, n

    def learn(self, event, admitted, evicted):
        pass


class Lru(Oracle):
    def value(self, e, event):
        return (self.used(e, event), *self.tie_key(e, event))

    def entry(self, e, event):
        return self.tie_key(e, event)


class Fifo(Oracle):
    def __init__(self, *args):
        super().__init__(*args)
        self.admitted = {}

    def value(self, e, event):
        entering = e in event.counts and e not in self.resident
        return (event.index if entering else self.admitted.get(e, -1), *self.tie_key(e, event))

    entry = Lru.entry

    def learn(self, event, admitted, evicted):
        self.admitted.update(dict.fromkeys(admitted, event.index))


class Lfu(Oracle):
    def __init__(self, experts, tie, weight):
        super().__init__(experts, tie)
        self.weight, self.frequency = weight, {}

    def more(self, e, event):
        n = event.counts.get(e, 0)
        return n if self.weight == "token" else min(n, 1)

    def value(self, e, event):
        frequency = self.frequency.get(e, 0) + self.more(e, event)
        return (frequency, self.used(e, event), *self.tie_key(e, event))

    def learn(self, event, admitted, evicted):
        if not event.prefill:
            for e in event.counts:
                self.frequency[e] = self.frequency.get(e, 0) + self.more(e, event)


class Lfuda(Oracle):
    """With the age spelled out. Counts in units of 1/256, halves rounded up."""

    def __init__(self, experts, tie, cap, ghost):
        super().__init__(experts, tie)
        self.cap, self.factor, self.age = cap * 256, ghost, 0
        self.count, self.key, self.ghost = {}, {}, {}

    def worth(self, e, event, sampled):
        return 256

    def raised(self, count, e, event, sampled=True):
        return min(count + self.worth(e, event, sampled), self.cap)

    def value(self, e, event):
        if e in event.counts:
            held = self.count.get(e, 0) if e in self.resident else self.ghost.get(e, 0)
            key = self.age + self.raised(held, e, event, sampled=False)
        else:
            # In prefill, a hit leaves the key as it is.
            key = self.key.get(e, self.age)
        return (key, self.used(e, event), *self.tie_key(e, event))

    def learn(self, event, admitted, evicted):
        if not event.prefill:
            for e in self.resident & set(event.counts):
                self.count[e] = self.raised(self.count[e], e, event)
                self.key[e] = self.age + self.count[e]
        ghost = dict(self.ghost)
        for e in evicted:
            self.age = max(self.age, self.key[e])
            ghost[e] = int(self.count[e] * self.factor + 0.5)
        for e in set(event.counts) - self.resident:
            raised = self.raised(self.ghost.get(e, 0), e, event)
            if e in admitted:
                self.count[e], self.key[e] = raised, self.age + raised
            elif not event.prefill:
                ghost[e] = raised
        self.ghost = ghost


class Oled(Oracle):
    """Confidence times gate weight, identity or one; priorities per row of the batch."""

    def __init__(self, experts, tie, mode, w, rho_in, rho_bnd, c_init, w_jc, rows):
        super().__init__(experts, tie)
        self.mode, self.w, self.c_init, self.w_jc = mode, w, c_init, w_jc
        self.rho_in, self.rho_bnd = rho_in, rho_bnd
        self.owner, self.block, self.rows = [None] * rows, [None] * rows, [{} for _ in range(rows)]

    def trust(self, status, confidence):
        masked = confidence if confidence >= 0 else self.c_init
        base = masked if status == 0 and self.w == "identity" else 1.0
        return base * (self.w_jc if status == 1 else 1.0)

    def provisional(self, e, event):
        return sum(self.trust(2 if s == 1 else s, c) * votes.get(e, 0) for _, s, c, votes in event.before)

    def priority(self, e):
        return sum(row.get(e, 0) for row in self.rows)

    def value(self, e, event):
        rest = (self.used(e, event), *self.tie_key(e, event))
        if self.mode == "protect":
            return (self.priority(e), *rest)  # only those that nobody wants are compared
        wanted = e in event.counts
        return (self.provisional(e, event) if wanted else self.rho_in * self.priority(e), wanted, *rest)

    def entry(self, e, event):
        return (self.provisional(e, event), *self.tie_key(e, event))

    def bypass(self, event):
        return lambda new, old: self.provisional(new, event) < self.rho_in * self.priority(old)

    def learn(self, event, admitted, evicted):
        for row, owner in enumerate(event.sequence):
            if owner != self.owner[row]:
                self.rows[row], self.block[row] = {}, None
            self.owner[row] = owner
            if not event.deciding[row]:
                continue
            if self.block[row] not in (None, event.block[row]):
                self.rows[row] = {e: p * self.rho_bnd for e, p in self.rows[row].items()}
            self.block[row] = event.block[row]
            new = {e: p * self.rho_in for e, p in self.rows[row].items()}
            for owner_row, status, confidence, votes in event.after:
                if owner_row == row:
                    for e, g in votes.items():
                        new[e] = new.get(e, 0) + self.trust(status, confidence) * g
            self.rows[row] = new
