"""More policies in plain Python, see ``reference``: those that know where a block ends."""

import math
from fractions import Fraction

from tests.retention.reference import Oled, Oracle

ONE, VOTE = 2**14, 2**16


def times(x: int, by: float) -> int:
    """``x`` times a factor that is held in units of 2^-14; halves up."""
    return math.floor(Fraction(x * round(by * ONE), ONE) + Fraction(1, 2))


def shares(votes: dict, experts) -> dict:
    """Parts of the sum in units of 2^-24, rounded down; votes in units of 2^-16."""
    total = sum(votes.values())
    return {e: math.floor(Fraction(votes.get(e, 0) * 2**24, total)) if total else 0 for e in experts}


class Blocks:
    """The boundary set, and per row the masks that its last sampling left."""

    def __init__(self, experts, eta):
        self.experts, self.eta = experts, eta
        self.boundary = dict.fromkeys(experts, 0)
        self.rows = {}

    def learn(self, event):
        starting = {r for r, on in enumerate(event.deciding) if on and event.phase[r] == 1 and event.step[r] == 0}
        if starting:
            wanted = {e for row, _, _, votes in event.after if row in starting for e in votes}
            for e in self.experts:
                self.boundary[e] += times((VOTE if e in wanted else 0) - self.boundary[e], self.eta)

    def tokens(self, event, row):
        """Statuses of a row's tokens."""
        return [status for owner, status, _, votes in event.after if owner == row and votes]


class Finishing(Blocks):
    """Whose coming forward holds no mask."""

    def learn(self, event):
        super().learn(event)
        for row, owner in enumerate(event.sequence):
            before, finishing = self.rows.get(row, (-1, False))
            statuses = self.tokens(event, row)
            if statuses or before != owner:
                finishing = event.deciding[row] and event.phase[row] == 1 and 0 not in statuses
            self.rows[row] = (owner, finishing)

    def finishing(self, row):
        return self.rows.get(row, (-1, False))[1]


class OledSteps(Oled):
    def __init__(self, experts, tie, mode, rho_in, rho_r, eta, pace, rows):
        super().__init__(experts, tie, mode, "identity", rho_in, 0.5, 0.25, 1, rows)
        self.blocks = Blocks(self.experts, eta)
        self.rho_r, self.pace, self.decays = rho_r, pace, mode == "select" or rho_in > 0
        self.paces, self.left = [0] * rows, [None] * rows

    def within(self, row):
        left = self.left[row]
        return 1 if left is None else 1 - round(math.exp(-left / self.rho_r) * ONE) / ONE

    def step(self, resident, event, capacity, mode):
        self.inside, self.gate, self.next = {}, {}, {}
        boundary = shares(self.blocks.boundary, self.experts)
        for row, priority in enumerate(self.rows):
            tokens = [t for t in event.before if t[0] == row]
            sums = {e: self.provisional(e, event._replace(before=tokens)) * VOTE for e in self.experts}
            now, held = shares(whole(sums), self.experts), shares(whole(scaled(priority)), self.experts)
            for e in self.experts:
                self.gate[e] = self.gate.get(e, 0) + times(now[e], self.within(row))
                self.inside[e] = self.inside.get(e, 0) + times(held[e], self.within(row))
                self.next[e] = self.next.get(e, 0) + times(boundary[e], 1 - self.within(row))
        return Oracle.step(self, resident, event, capacity, mode)

    def worth(self, e, event):
        staying = times(self.inside[e], self.rho_in) if self.decays else self.inside[e]
        return self.next[e] + (self.gate[e] if e in event.counts else staying)

    def value(self, e, event):
        last = (self.used(e, event), *self.tie_key(e, event))
        return (self.worth(e, event), e in event.counts, self.inside[e], *last)

    def entry(self, e, event):
        if self.mode == "protect" and self.decays:
            return self.value(e, event)
        return (self.gate[e] + self.next[e], *self.tie_key(e, event))

    def bypass(self, event):
        return lambda new, old: self.decays and self.value(new, event) < self.value(old, event)

    def learn(self, event, admitted, evicted):
        for row, owner in enumerate(event.sequence):
            if owner != self.owner[row]:
                self.paces[row], self.left[row] = 0, None
            statuses = self.blocks.tokens(event, row)
            if not event.deciding[row] or not statuses:
                continue
            if event.phase[row] == 1:
                now = statuses.count(1) * 256
                pace = self.paces[row]
                self.paces[row] = pace + times(now - pace, self.pace) if pace else now
            masks = len(statuses) if event.phase[row] == 2 else statuses.count(0)
            self.left[row] = -(-masks * 256 // max(256, self.paces[row]))
        self.blocks.learn(event)
        super().learn(event, admitted, evicted)


class Boundary(Oled):
    def __init__(self, experts, tie, mode, base, rho_in, guarded, eta, rows):
        super().__init__(experts, tie, mode, "identity", rho_in, 0.5, 0.25, 1, rows)
        self.base, self.guarded, self.blocks = base, guarded, Finishing(self.experts, eta)

    def step(self, resident, event, capacity, mode):
        present = sum(owner is not None and owner >= 0 for owner in self.owner)
        count = self.guarded * sum(map(self.blocks.finishing, range(len(self.rows)))) // max(1, present)
        there, worth = set(resident) | set(event.counts), self.blocks.boundary
        order = sorted((e for e in there if worth[e]), key=lambda e: (worth[e], -e), reverse=True)
        self.safe = set(order[:count])
        return super().step(resident, event, capacity, mode)

    def provisional(self, e, event):
        return super().provisional(e, event) if self.base == "oled" else 0

    def priority(self, e):
        return super().priority(e) if self.base == "oled" else 0

    def value(self, e, event):
        return (e in self.safe, *super().value(e, event))

    def entry(self, e, event):
        contested = self.mode == "protect" and self.rho_in > 0
        return (contested and e in self.safe, *super().entry(e, event))

    def bypass(self, event):
        base = super().bypass(event)

        def loses(new, old):
            if self.rho_in == 0 or (new in self.safe) != (old in self.safe):
                return self.rho_in > 0 and old in self.safe
            return base(new, old)

        return loses

    def learn(self, event, admitted, evicted):
        self.blocks.learn(event)
        super().learn(event, admitted, evicted)


class Status(Oracle):
    """Without successors. ``others`` is "votes", "popular" or "auto"."""

    def __init__(self, experts, tie, mode, masked, eta, others, capacity, rows):
        super().__init__(experts, tie)
        self.mode, self.masked, self.others, self.capacity = mode, masked, others, capacity
        self.blocks, self.votes = Finishing(self.experts, eta), [{} for _ in range(rows)]
        self.popular, self.width = dict.fromkeys(self.experts, 0), None

    def weight(self, status):
        return self.masked if status == 0 else 1

    def gate(self, e, event):
        return sum(
            self.weight(status) * votes.get(e, 0)
            for row, status, _, votes in event.before
            if not self.blocks.finishing(row)
        )

    def coming(self, e):
        return self.blocks.boundary[e] / VOTE * sum(map(self.blocks.finishing, range(len(self.votes))))

    def value(self, e, event):
        wanted, coming = e in event.counts, self.coming(e)
        held = coming + sum(v.get(e, 0) for row, v in enumerate(self.votes) if not self.blocks.finishing(row))
        behind = (held,)
        if self.others != "votes":
            ample = self.others == "popular" or self.width is None or self.capacity * 256 >= self.width
            behind = (coming, self.popular[e] if ample else 0, held)
        rest = (self.used(e, event), *self.tie_key(e, event))
        if self.mode == "protect":
            return (wanted, coming + self.gate(e, event), *rest) if wanted else (wanted, *behind, *rest)
        return (coming + (self.gate(e, event) if wanted else 0), wanted, *behind, *rest)

    def entry(self, e, event):
        return (self.coming(e) + self.gate(e, event), *self.tie_key(e, event))

    def learn(self, event, admitted, evicted):
        for row, owner in enumerate(event.sequence):
            if owner != self.blocks.rows.get(row, (-1, False))[0]:
                self.votes[row] = {}
            if event.deciding[row]:
                self.votes[row] = {}
                for owner_row, status, _, votes in event.after:
                    if owner_row == row:
                        for e, g in votes.items():
                            self.votes[row][e] = self.votes[row].get(e, 0) + self.weight(status) * g
        if not event.prefill:
            size = len(event.counts) * 256
            self.width = self.width + (size - self.width) // 32 if self.width else size
            for e in event.counts:
                self.popular[e] += 1
        self.blocks.learn(event)


class StaticBlock(Oracle):
    def __init__(self, experts, rows):
        super().__init__(experts)
        self.owner, self.block = [None] * rows, [None] * rows
        self.running, self.picked = [{} for _ in range(rows)], [{} for _ in range(rows)]

    def value(self, e, event):
        return (sum(picked.get(e, 0) for picked in self.picked), -e)

    def entry(self, e, event):
        return self.value(e, event)

    def bypass(self, event):
        return lambda new, old: self.value(new, event) < self.value(old, event)

    def step(self, resident, event, capacity, mode):
        pick = sorted(self.experts, key=lambda e: self.value(e, event), reverse=True)[:capacity]
        allowed = {e: n for e, n in event.counts.items() if e in pick or e in resident}
        return super().step(resident, event._replace(counts=allowed), capacity, mode)

    def learn(self, event, admitted, evicted):
        for row, owner in enumerate(event.sequence):
            if owner != self.owner[row]:
                self.running[row], self.picked[row], self.block[row] = {}, {}, None
            self.owner[row] = owner
            if not event.deciding[row]:
                continue
            if self.block[row] not in (None, event.block[row]) and self.running[row]:
                self.picked[row], self.running[row] = self.running[row], {}
            self.block[row] = event.block[row]
            for owner_row, _, _, votes in event.after:
                if owner_row == row:
                    for e in votes:
                        self.running[row][e] = self.running[row].get(e, 0) + 1
            if event.phase[row] == 2:
                self.picked[row], self.running[row] = self.running[row], {}


def scaled(votes: dict) -> dict:
    return {e: p * VOTE for e, p in votes.items()}


def whole(votes: dict) -> dict:
    """What exact votes are in whole units, halves up, as they are added one by one."""
    return {e: math.floor(v + 0.5) for e, v in votes.items()}
