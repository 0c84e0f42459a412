"""The training loop: steps until the recipe's last or until time is up, with reports on the way.

Promises: the device always has a few steps queued, and never more, so that a stop comes soon; nothing of a step is
waited for but its end. Numbers are read once a report.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from objective import Sums, no_sums
from presets import LENGTH, Preset
from routing import load_report
from training import TrainState, learning_rate

QUEUED = 3  # steps that the device may be behind the host


@dataclasses.dataclass(frozen=True)
class Report:
    """What the steps since the last report gave; serialises to JSON.

    ``loss``: mean over the steps; ``accuracy``, ``by_kind``: share of right predictions at masked tokens, the
    end-of-text fill left out; ``confident``: share of predictions above the decoding threshold; ``confident_right``: of
    these, the right ones; ``tokens_per_second``: positions of both halves; ``load``: see ``routing.load_report``.
    """

    step: int
    loss: float
    accuracy: float
    confident: float
    confident_right: float
    by_kind: dict[str, float]
    gradient_norm: float
    learning_rate: float
    ms_per_step: float
    tokens_per_second: float
    dropped: float
    load: dict[str, list]

    def line(self) -> str:
        """One line for the terminal."""
        load = f"load {min(self.load['min']):.2f}..{max(self.load['max']):.2f}, {sum(self.load['dead'])} dead"
        load += f", {self.dropped:.1%} dropped" if self.dropped else ""
        return (
            f"step {self.step:,}: loss {self.loss:.4f}, {self.accuracy_text()}, confident "
            f"{self.confident:.2f} ({self.confident_right:.3f} right), {self.ms_per_step:.1f} ms, "
            f"{self.tokens_per_second:,.0f} tokens/s, {load}, gradient {self.gradient_norm:.2f}"
        )

    def load_text(self) -> str:
        """Smallest and largest load of each MoE layer, and its dead experts where there are any."""
        layers = zip(self.load["min"], self.load["max"], self.load["dead"], strict=True)
        return " ".join(f"{low:.2f}..{high:.2f}{f' ({dead} dead)' if dead else ''}" for low, high, dead in layers)

    def accuracy_text(self) -> str:
        """Accuracy of all and by kind."""
        kinds = " ".join(f"{kind} {share:.2f}" for kind, share in self.by_kind.items())
        return f"accuracy {self.accuracy:.3f} ({kinds})"


def run_steps(
    step: Callable[..., tuple[TrainState, Sums, Any]],
    preset: Preset,
    kinds: tuple[str, ...],
    state: TrainState,
    batches: Iterable[tuple[int, Any]],
    seed: int,
    *,
    out_of_time: Callable[[], bool],
    every: int,
    on_report: Callable[[Report, TrainState], None],
) -> TrainState:
    """Trains until ``preset.recipe.steps`` or ``out_of_time()``; returns the state, and takes ``state`` over (donated).

    ``step`` is ``training.jitted_step``, compiled or not; ``batches`` gives (step number, batch) from the state's step
    on; ``on_report(report, state)`` is called every ``every`` steps, and must not keep the state.
    """
    sums, queued, begun = no_sums(preset.config, len(kinds)), collections.deque(), time.perf_counter()
    done = int(state.step)
    for number, batch in batches:
        if done >= preset.recipe.steps or out_of_time():
            break
        if number != done:
            raise ValueError(f"batch {number} came where {done} was due")
        state, sums, number_done = step(state, sums, batch, np.uint32(seed))
        done += 1
        queued.append(number_done)
        if len(queued) > QUEUED:
            queued.popleft().block_until_ready()
        if done % every == 0:
            got = jax.device_get(sums)
            seconds = time.perf_counter() - begun
            on_report(report_of(preset, kinds, done, got, seconds), state)
            sums, begun = no_sums(preset.config, len(kinds)), time.perf_counter()
    return state


def report_of(preset: Preset, kinds: tuple[str, ...], step: int, sums: Sums, seconds: float) -> Report:
    """The report of ``sums`` (numpy), gathered in ``seconds`` up to ``step``."""
    batches = max(1.0, float(sums.batches))
    masked = max(1.0, float(sums.masked.sum()))
    confident = float(sums.confident.sum())
    return Report(
        step=step,
        loss=float(sums.loss) / batches,
        accuracy=float(sums.correct.sum()) / masked,
        confident=confident / masked,
        confident_right=float(sums.both.sum()) / max(1.0, confident),
        by_kind={
            kind: round(float(right / count), 4)
            for kind, right, count in zip(kinds, sums.correct, sums.masked, strict=True)
            if count
        },
        gradient_norm=float(sums.gradient) / batches,
        learning_rate=float(learning_rate(preset)(step)),
        ms_per_step=1e3 * seconds / batches,
        tokens_per_second=2 * LENGTH * preset.recipe.batch * batches / seconds,
        dropped=float(sums.dropped) / batches,
        load=load_report(np.asarray(sums.load)),
    )
