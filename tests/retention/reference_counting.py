"""More policies in plain Python, see ``reference``: those that count, queue, or refresh now and then."""

from collections import deque

from tests.retention.reference import Lfu, Lfuda, Oracle


def half_up(x: float) -> int:
    """Rounded to the nearest integer, halves up; exact for what is fed to it."""
    return int(x + 0.5)


class LfuInCache(Lfu):
    def learn(self, event, admitted, evicted):
        super().learn(event, admitted, evicted)
        staying = (self.resident - evicted) | admitted
        self.frequency = {e: f for e, f in self.frequency.items() if e in staying}


class Lfru(Lfu):
    def value(self, e, event):
        frequency, *rest = super().value(e, event)
        return (frequency * 4096 // (1 + event.index - self.used(e, event)), *rest)


class LfudaConf(Lfuda):
    def __init__(self, experts, tie, cap, ghost, w, c_init):
        super().__init__(experts, tie, cap, ghost)
        self.w, self.c_init = w, c_init

    def worth(self, e, event, sampled):
        if sampled and event.prefill:
            return 256
        total = 0
        for _, status, confidence, votes in event.after if sampled else event.before:
            trust = 1 if status or self.w == "one" else self.c_init if confidence < 0 else confidence
            total += votes.get(e, 0) * trust
        return min(256, int(total * 256))


class S3Fifo(Oracle):
    """Queues that are queues. Room is made one head at a time, then the newcomers go to their tails."""

    def __init__(self, experts, tie, share, slots):
        super().__init__(experts, tie)
        self.share, self.slots = share, slots
        self.small, self.main, self.ghost, self.hits = deque(), deque(), [], {}

    def step(self, resident, event, capacity, mode):
        self.resident, wanted = set(resident), set(event.counts)
        free = capacity - len(resident)
        entering = sorted(wanted - resident, key=lambda e: self.entry(e, event), reverse=True)
        self.entering = entering[: free + len(resident - wanted)]
        before = deque(self.small), deque(self.main), list(self.ghost), dict(self.hits)
        self.known = set(self.ghost)
        evicted = {self.give_up(wanted) for _ in range(len(self.entering) - free)}
        if event.prefill:
            self.small, self.main, self.ghost, self.hits = before
        return set(self.entering), evicted

    def give_up(self, wanted):
        while len(self.small) >= self.share and set(self.small) - wanted:
            head = self.small.popleft()
            if head in wanted:
                self.small.append(head)
            elif self.hits[head] >= 2:
                self.main.append(head)
                self.hits[head] = 0
            else:
                return self.gone(head)
        while set(self.main) - wanted:
            head = self.main.popleft()
            if head not in wanted and self.hits[head] == 0:
                return head
            self.hits[head] -= head not in wanted
            self.main.append(head)
        while True:
            head = self.small.popleft()
            if head not in wanted:
                return self.gone(head)
            self.small.append(head)

    def gone(self, head):
        self.ghost = [*self.ghost, head][-self.slots :] if self.slots else []
        return head

    def learn(self, event, admitted, evicted):
        for queue in (self.small, self.main):
            for e in evicted & set(queue):
                queue.remove(e)
        if not event.prefill:
            for e in self.resident & set(event.counts):
                self.hits[e] = min(3, self.hits[e] + 1)
        for e in self.entering:
            (self.main if e in self.known else self.small).append(e)
            self.hits[e] = 0
        self.ghost = [e for e in self.ghost if e not in admitted]


class HybriMoe(Oracle):
    """Scores in units of 2^-24; ``alpha`` a small binary fraction."""

    def __init__(self, experts, tie, alpha, chosen):
        super().__init__(experts, tie)
        self.alpha, self.chosen, self.score = alpha, chosen, {}

    def moved(self, event):
        tokens = [votes for row, _, _, votes in event.before if row >= 0 and votes]
        mean = {e: sum(votes.get(e, 0) for votes in tokens) * 2**24 // len(tokens) for e in event.counts}
        best = sorted((e for e in mean if mean[e]), key=lambda e: (mean[e], -e), reverse=True)[: 2 * self.chosen]
        return {
            e: half_up(self.alpha * (mean[e] if e in best else 0)) + half_up((1 - self.alpha) * self.score.get(e, 0))
            for e in {*self.score, *event.counts}
        }

    def step(self, resident, event, capacity, mode):
        self.now = self.moved(event)
        return super().step(resident, event, capacity, mode)

    def value(self, e, event):
        return (self.now.get(e, 0), self.used(e, event), *self.tie_key(e, event))

    def learn(self, event, admitted, evicted):
        if not event.prefill:
            self.score = self.now


class Dali(Oracle):
    """Loads in units of 1/256 token."""

    def __init__(self, experts, tie, alpha):
        super().__init__(experts, tie)
        self.alpha, self.load_of = alpha, {}

    def now(self, e, event):
        tokens = event.counts.get(e, 0) * 256
        return half_up(self.alpha * tokens) + half_up((1 - self.alpha) * self.load_of.get(e, 0))

    def value(self, e, event):
        return (self.now(e, event), self.used(e, event), *self.tie_key(e, event))

    def bypass(self, event):
        return lambda new, old: self.now(new, event) < self.now(old, event)

    def step(self, resident, event, capacity, mode):
        if mode == "protect":  # competing in the order of keeping, and not in that of admission
            self.entry = self.value
        return super().step(resident, event, capacity, mode)

    def learn(self, event, admitted, evicted):
        if not event.prefill:
            self.load_of = {e: self.now(e, event) for e in self.experts}


class Tide(Oracle):
    """``tau`` steps from refresh to refresh; ``paper``: by tokens so far, an exchange only where it improves."""

    def __init__(self, experts, tie, capacity, tau, paper=False):
        super().__init__(experts, tie)
        self.capacity, self.tau, self.paper, self.used_by = capacity, tau, paper, {}
        self.rows = {}  # by row: sequence, first block or None, expected block, expected step

    def refreshes(self):
        present = [place for place in self.rows.values() if place[0] >= 0]
        if not present or any(first is None or first == block for _, first, block, _ in present):
            return True
        return min(step for *_, step in present) % self.tau == 0

    def value(self, e, event):
        n, rest = event.counts.get(e, 0), (self.used(e, event), *self.tie_key(e, event))
        if self.paper:
            return (self.used_by.get(e, 0) + n, e in self.resident, *rest)
        return (e in self.target, n, *rest)

    def step(self, resident, event, capacity, mode):
        wanted = sorted(event.counts, key=lambda e: (event.counts[e], *self.tie_key(e, event)), reverse=True)
        self.target = set(wanted) if self.paper else set(wanted[:capacity])
        if not self.refreshes():
            return set(), set()
        # Whoever is not a target runs and is gone, but when resident it is wanted all the same.
        barred = set(event.counts) - self.target - set(resident)
        if mode == "protect":
            self.entry = self.value if self.paper else super().entry
        return super().step(resident, event._replace(counts=without(event.counts, barred)), capacity, mode)

    def bypass(self, event):
        return lambda new, old: self.paper and self.value(new, event) < self.value(old, event)

    def learn(self, event, admitted, evicted):
        if not event.prefill:
            for e, n in event.counts.items():
                self.used_by[e] = self.used_by.get(e, 0) + n
        for row, owner in enumerate(event.sequence):
            sequence, first, block, step = self.rows.get(row, (-1, None, None, -1))
            if sequence != owner:
                first, block, step = None, None, -1
            if event.deciding[row]:
                first = event.block[row] if first is None else first
                block = event.block[row] + (event.phase[row] == 2)
                step = 0 if event.phase[row] == 2 else event.step[row] + 1
            self.rows[row] = (owner, first, block, step)


def without(counts: dict, barred: set) -> dict:
    return {e: n for e, n in counts.items() if e not in barred}
