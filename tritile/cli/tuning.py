"""What `tritile tune` does with a list of problems: measure on this GPU, or predict for another."""

import os
import re
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from tritile.choose import aten, gpu_tables, pick
from tritile.cli import shared
from tritile.cli.shared import console, counted, interruptible
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.problem import Problem, Tiled
from tritile.core.settings import uses_aten
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.tune import now
from tritile.tune.subject.problem import is_tuned
from tritile.tuner.measure.engine import Rules, Tuned
from tritile.tuner.measure.workers import PoolRunner
from tritile.tuner.store.trial import TORCH, Trial, best_of
from tritile.tuner.store.trials import store_of


def ranks() -> tuple[int, int, int, int]:
    """Return torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; 0, 1, 0, 1 without it.

    Raises InvalidValueError if they are inconsistent.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1, 0, 1
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: os.environ.get(name, "") for name in names}
    shown = ", ".join(f"{name}={text}" for name, text in texts.items())
    rank, size, on_host, of_host = (int(each) if each.isdecimal() else -1 for each in texts.values())
    if not (0 <= rank < size and 0 <= on_host < of_host):
        expected = "expected the variables that torchrun sets, or no WORLD_SIZE for one process"
        raise InvalidValueError(f"{shown}: {expected}")
    return rank, size, on_host, of_host


def _torch_us(problem: Problem, device: Device) -> float | None:
    trial = store_of(device).best(TORCH, problem)
    return None if trial is None else trial.us


def _summary(done: Sequence[Tuned], device: Device, seconds: float) -> str:
    best = {tuned.problem: tuned.best.time for tuned in done if tuned.best is not None}
    text = f"{counted(len(best), 'problem')} in {seconds:.0f} s"
    ratios = {
        problem.label: torch_us / us
        for problem, us in best.items()
        if (torch_us := _torch_us(problem, device))
    }
    if ratios:
        worst = min(ratios, key=ratios.__getitem__)
        text += f": {statistics.geometric_mean(ratios.values()):.2f}x as fast as torch (geometric mean)"
        text += f", worst {ratios[worst]:.2f} ({worst})" if len(ratios) > 1 else ""
        text += f", of {len(ratios)} compared" if len(ratios) < len(best) else ""
    store = store_of(device)
    lost = f"{counted(len(store.unwritten), 'trial')} lost: {store.path} cannot be written"
    return f"{text}; {lost if store.unwritten else f'remembered in {store.path}'}"


def measurable(problems: Iterable[Tiled]) -> list[Tiled]:
    """Drop the problems that only torch computes, with a message. Raises UnsupportedError if none is left."""
    kept = list[Tiled]()
    for problem in problems:
        if problem.needs_torch:
            shared.say(f"{problem.label}: left out, because only torch computes it")
        else:
            kept.append(problem)
    if not kept:
        raise UnsupportedError("only torch computes such problems: there is nothing of tritile's to measure")
    return kept


def tune_here(
    problems: list[Tiled], device: Device, rank: str, rules: Rules, budget: float | None, force: bool,
    jobs: int, as_json: bool,
) -> int:  # fmt: skip
    """Tune on the current GPU; return how many problems are left. `rank` precedes what a rank prints."""
    gpu_tables.pinned(device)  # a TRITILE_TABLE that cannot be read ends it before anything is measured
    index, store, started = devices.current_index(), store_of(device), time.monotonic()
    store.catch_up()
    todo = [problem for problem in problems if force or not is_tuned(problem, device)]
    others = f"{len(todo)} of {counted(len(problems), 'problem')} to tune, the others are remembered"
    console.print(f"{rank}{device.name}: {others}")
    done, failures = list[Tuned](), Counter[str]()

    def on_trial(digest: str, trial: Trial) -> None:
        store.add(digest, trial)
        if trial.failure:
            reason = re.sub(r"\d+", "..", trial.failure.partition(":")[0])  # bytes, registers
            failures[textwrap.shorten(reason, 60, placeholder=" ...")] += 1

    with interruptible(budget) as should_continue, shared.progress(not rank) as bar:
        task = bar.add_task("tuning", total=len(todo))
        with PoolRunner(index, jobs) as runner:
            for tuned in now.tune(todo, device, runner, on_trial, rules, force, should_continue):
                done.append(tuned)
                label, best, torch_us = tuned.problem.label, tuned.best, _torch_us(tuned.problem, device)
                if best is None:
                    shared.say(f"{rank}{label}: {tuned.failure}")
                else:
                    torch_text = f", torch {torch_us:.1f} us" if torch_us else ""
                    tried = f"({counted(tuned.trials, 'config')}, {tuned.seconds:.1f} s)"
                    console.print(f"{rank}{label}: {best.time:.1f} us{torch_text}, {best.config} {tried}")
                bar.update(task, advance=1, description=label)
        bar.update(task, description="timing torch")
        for problem in problems:  # also those that a run tuned before it was stopped
            is_timed = any(trial.is_final for trial in store.trials(TORCH, problem))
            if not is_timed and best_of(pick.trials(problem, device)) is not None and should_continue():
                now.time_torch(problem, device, index or 0)
    store.catch_up()
    left, seconds = sum(not is_tuned(problem, device) for problem in todo), time.monotonic() - started
    if left > sum(tuned.best is None for tuned in done):
        console.print(f"{rank}{counted(left, 'problem')} left: the same command goes on from here")
    if as_json:
        listed = [
            {
                "problem": tuned.problem.label,
                "us": tuned.best and tuned.best.time,
                "torch_us": _torch_us(tuned.problem, device),
                "tried": tuned.trials,
                "config": tuned.best and tuned.best.config.to_dict(),
                "failure": tuned.failure,
            }
            for tuned in done
        ]
        facts = {"gpu": device.name, "seconds": seconds, "left": left, "store": store.path}
        shared.print_json(facts | {"problems": listed})
        return left
    if failures:
        reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common(4))
        console.print(f"{rank}configs that failed: {reasons}")
    console.print(f"{rank}{_summary(done, device, seconds)}")
    return left


_MEASURED: Final = "exact", "pinned", "table"  # sources of plans whose reasons are short


def tune_elsewhere(problems: list[Tiled], device: Device, as_json: bool) -> None:
    """Print what calls would run on a GPU that is not installed, and the predicted times."""
    planned, ratios = list[pick.Plan](), dict[str, float]()
    with shared.progress() as bar:
        for problem in bar.track(problems, description="predicting"):
            try:
                plan = pick.plan_for(problem, device, "cached", uses_aten())
            except UnsupportedError as error:
                shared.say(str(error))
                continue
            assert plan is not None  # only mode "tune" returns None
            planned.append(plan)
            by_torch = plan.config == aten.CONFIG
            if plan.us and plan.other_us:
                ratios[problem.label] = 1.0 if by_torch else plan.other_us / plan.us
            if not as_json:
                us = f"{plan.us:.1f} us" if plan.us else "no estimate"
                name, config = ("tritile", "") if by_torch else ("torch", f", {plan.config}")
                other = f", {name} {plan.other_us:.1f} us" if plan.other_us else ""
                origin = plan.why if by_torch or plan.source in _MEASURED else plan.source
                console.print(f"{problem.label}: {us}{other}{config} ({origin})")
    if not planned:
        raise UnsupportedError(f"{device.name} runs none of these problems")
    if as_json:
        listed = [
            {"problem": plan.problem.label, "us": plan.us, "other_us": plan.other_us, "source": plan.source}
            | {"config": plan.config.to_dict()}
            for plan in planned
        ]
        return shared.print_json({"gpu": device.name, "problems": listed})
    measured = sum(plan.source in _MEASURED for plan in planned)
    unmeasured = sum(plan.source == "torch" for plan in planned)
    text = f"{device.name}: {measured} measured before, {len(planned) - measured - unmeasured} predicted"
    if unmeasured:
        text += f", {unmeasured} left to torch's kernel"
    if ratios:
        text += f"; {statistics.geometric_mean(ratios.values()):.2f}x as fast as torch (geometric mean)"
        text += f", of {len(ratios)} compared" if len(ratios) < len(planned) else ""
    console.print(text)
    console.print("nothing was measured now: calls on such a GPU use these configs as they are")
    console.print(
        "to measure there, run this command without --target; `tritile export` then writes the best as a "
        "table, which TRITILE_TABLE pins on other machines"
    )
