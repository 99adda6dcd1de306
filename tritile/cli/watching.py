"""Follow a search for the person who waits: a live table on a terminal, plain lines elsewhere."""

import math
import re
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from tritile.cli import columns
from tritile.cli.columns import number
from tritile.cli.shared import console, notes, say
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.planning.torch_times import measured
from tritile.planning.trial import Trial
from tritile.tune.measure.tasks import Tuned

_SHOWN = 12  # problems of the live table, the latest


def torch_us(problem: object, device: Device) -> float | None:
    """Return the microseconds that torch was measured to take for just this problem; None if unknown."""
    known = measured(problem, device) if isinstance(problem, MatmulProblem | PermuteProblem) else None
    return known.torch_us if known else None


@dataclass
class _Line:
    """Hold what is known of a problem's search so far; times in microseconds."""

    label: str
    torch_us: float | None = None
    tried: int = 0
    best_us: float = math.inf
    tuned: Tuned | None = None

    @property
    def over_torch(self) -> float | None:
        """Return torch's time by the best one; None where one of them is not known."""
        return self.torch_us / self.best_us if self.torch_us and self.best_us < math.inf else None


class Watch:
    """Follow the searches of `total` problems on a GPU, of at most `budget_s` seconds."""

    def __init__(
        self,
        total: int,
        device: Device,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._lines: dict[Any, _Line] = {}
        self._total, self._device, self._budget = total, device, budget_s
        self._clock, self._begun = clock, clock()

    def _line(self, problem: Any) -> _Line:
        if problem not in self._lines:
            self._lines[problem] = _Line(problem.label, torch_us(problem, self._device))
        return self._lines[problem]

    def tried(self, trial: Trial) -> None:
        """Take note of a trial."""
        line = self._line(trial.problem)
        line.tried += 1
        line.best_us = min(line.best_us, trial.time)
        if trial.failure:
            reason = re.sub(r"\d+", "..", trial.failure.partition(":")[0])  # bytes, registers
            self.failures[textwrap.shorten(reason, 60, placeholder=" ...")] += 1

    def done(self, tuned: Tuned, who: str = "") -> None:
        """Take note of a search that has ended, and print it where no table shows it."""
        line = self._line(tuned.problem)
        line.tuned = tuned
        if tuned.best is None:
            say(f"{who}{line.label}: {tuned.failure}")
            return
        line.best_us = tuned.best.time
        if who or not (console.is_terminal and notes.is_terminal):
            beside = f", torch {line.torch_us:.1f} us" if line.torch_us else ""
            console.print(
                f"{who}{line.label}: {line.best_us:.1f} us{beside}, {tuned.best.config} "
                f"({tuned.trials} configs, {tuned.seconds:.1f} s)",
                soft_wrap=True,
            )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show a live table of the latest problems on standard error; nothing where that is no terminal."""
        if not notes.is_terminal:
            yield
            return
        with Live(get_renderable=lambda: self.table, console=notes, refresh_per_second=4):
            yield

    @property
    def seconds(self) -> float:
        """Return the seconds since the watch began."""
        return self._clock() - self._begun

    @property
    def left_s(self) -> float | None:
        """Return the seconds that are expected to be left; None before a problem is done."""
        done = sum(line.tuned is not None for line in self._lines.values())
        budget = math.inf if self._budget is None else max(0.0, self._budget - self.seconds)
        rest = self.seconds / done * (self._total - done) if done else math.inf
        return min(budget, rest) if min(budget, rest) < math.inf else None

    @property
    def reasons(self) -> str:
        """Failures by reason, the most frequent first."""
        return ", ".join(f"{count} {reason}" for reason, count in self.failures.most_common(4))

    @property
    def table(self) -> Group:
        """Return the latest problems as a table, and below it how far all of them are."""
        rows = [
            {
                "problem": line.label,
                "tried": number(line.tried),
                "best us": number(line.best_us if line.best_us < math.inf else None, ".1f"),
                "torch us": number(line.torch_us, ".1f"),
                "x torch": number(line.over_torch, ".2f", bad=(line.over_torch or 1.0) < 1),
                "": "" if line.tuned is None else "done" if line.tuned.best else "failed",
            }
            for line in list(self._lines.values())[-_SHOWN:]
        ]
        done = sum(line.tuned is not None for line in self._lines.values())
        ends = done == self._total or self.left_s is None
        left = "" if ends else f", some {self.left_s:.0f} s left"
        failed = f"; configs that failed: {self.reasons}" if self.failures else ""
        below = Text(f"{done} of {self._total} problems, {self.seconds:.0f} s{left}{failed}")
        return Group(columns.table(rows), below) if rows else Group(below)

    def know_torch(self, measure: Callable[[Any], None], keep_on: Callable[[], bool]) -> None:
        """Have torch measured beside each winner that it is not known of; `measure` remembers its time."""
        for problem, line in self._lines.items():
            if not keep_on():
                return
            if line.torch_us is None and line.best_us < math.inf:
                line.torch_us = torch_us(problem, self._device)  # what is known counts once there is a winner
                if line.torch_us is None and isinstance(problem, MatmulProblem | PermuteProblem):
                    measure(problem)
                    line.torch_us = torch_us(problem, self._device)

    def summary(self) -> str:
        """Return one line on what was done, and how it compares with torch."""
        done = [line for line in self._lines.values() if line.tuned is not None and line.tuned.best]
        compared = [line for line in done if line.over_torch]
        text = f"{len(done)} problem{'s' * (len(done) != 1)} in {self.seconds:.0f} s"
        if compared:
            ratios = [line.over_torch or 1.0 for line in compared]
            worst = min(compared, key=lambda line: line.over_torch or 1.0)
            text += f": {statistics.geometric_mean(ratios):.2f}x torch on the mean"
            text += f", worst {worst.over_torch:.2f} ({worst.label})" if len(compared) > 1 else ""
            text += f", of {len(compared)} compared" if len(compared) < len(done) else ""
        return text

    def to_list(self) -> list[dict[str, Any]]:
        """Return what became of each problem, as JSON holds it."""
        return [
            {
                "problem": line.label,
                "us": line.best_us,
                "torch_us": line.torch_us,
                "tried": line.tried,
                "config": line.tuned.best.config.to_dict() if line.tuned and line.tuned.best else None,
                "failure": line.tuned.failure if line.tuned else "not done",
            }
            for line in self._lines.values()
        ]
