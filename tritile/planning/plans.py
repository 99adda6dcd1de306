"""The ladder by which a call gets its config: memo, store, table, portfolio, model."""

from dataclasses import dataclass, replace

import torch

from tritile.core.config import Config
from tritile.core.device import INTERPRETER, Device
from tritile.core.forgetting import new_memo
from tritile.core.markup import table_html
from tritile.core.pointer import Pointer
from tritile.core.problem import PermuteProblem, Tiled
from tritile.core.settings import current_mode
from tritile.core.versions import warn_untested
from tritile.core.views import posed
from tritile.errors import NotTunedError
from tritile.families.pieces import workspace_bytes
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.planning import model, table
from tritile.planning.classes import class_of
from tritile.planning.portfolio import RACED, Portfolio
from tritile.planning.store import is_frozen, store_of
from tritile.planning.trial import Trial, best_of


@dataclass(frozen=True)
class Plan:
    """What would run for a problem, and why.

    `source`: "exact" (measured here for just this problem), "pinned" (in the table of
    TRITILE_TABLE), "table" (shipped with tritile), "predicted" (of the class's portfolio, by times measured
    at other sizes), "model" (predicted with nothing of its class measured), "interpreter" (host tensors).
    `us` is the time, in microseconds, that was measured or (from the model) predicted; None where the
    source has none. `current` is False where it comes from a table that holds no measurements of the kernel
    as it is.
    """

    problem: Tiled
    config: Config
    source: str
    device: Device
    us: float | None = None
    why: str = ""
    current: bool = True

    @property
    def workspace(self) -> int:
        """Return bytes of workspace that a call takes while it runs, 0 in the interpreter."""
        if self.source == "interpreter":
            return 0

        def make(dtype: str, elements: int) -> Pointer:
            return Pointer(getattr(torch, dtype))

        return workspace_bytes(posed(self.problem, make), self.config, self.device)

    def __repr__(self) -> str:
        time = "" if self.us is None else f", {self.us:.1f} us"
        lines = (
            f"Plan for {self.problem.label} on {self.device.name}",
            f"  config  {self.config}",
            f"  source  {self.source}{time}: {self.why}",
            f"  memory  {self.workspace} bytes of workspace",
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        time = "" if self.us is None else f"{self.us:.1f} us"
        room = f"{self.workspace} bytes"
        pairs = (("source", self.source), ("time", time), ("why", self.why), ("workspace", room))
        rows = (("config", self.config), *pairs)
        return table_html(f"{self.problem.label} on {self.device.name}", ("", ""), rows)


_memo: dict[tuple[Tiled, Device, str], Plan] = new_memo()


def forget() -> None:
    """Drop every plan made so far in this process: after new measurements, plans may change."""
    _memo.clear()


def trials(problem: Tiled, device: Device) -> list[Trial]:
    """Everything measured for this problem on this device, over all kernel families."""
    first, *more = (kernel.digest for kernel in FAMILIES[problem.op].values())
    return store_of(device).trials(first, problem, *more)


def _plainly(problem: Tiled) -> Tiled:
    """Return the same problem of a call that need not be batch-invariant, of which more is known."""
    if isinstance(problem, PermuteProblem) or not problem.invariant:
        return problem
    return replace(problem, invariant=False)


def _measured(problem: Tiled, device: Device, asked: Tiled) -> Plan | None:
    """Return the fastest config of those measured for `asked` that may run the problem."""
    known = [trial for trial in trials(asked, device) if trial.works]
    good = [trial for trial in known if illegal(trial.config, problem, device) is None]
    best = best_of(good)
    if best is None:
        return None
    why = f"the fastest of {len(good)} measured on this GPU"
    return Plan(problem, best.config, "exact", device, best.us, why)


def pinned(problem: Tiled, device: Device) -> Plan | None:
    """Tell what the table of TRITILE_TABLE holds, if it may run here."""
    found = table.pinned(device)
    entry = _entry(found, problem) if found is not None else None
    if found is None or entry is None or illegal(entry.config, problem, device) is not None:
        return None
    current = _table_counts(found, problem)
    behind = ", of another version of the kernel" if found.measured else ", predicted and compiled"
    why = "of the table that is pinned" + behind * (not current)
    return Plan(problem, entry.config, "pinned", device, entry.us, why, current)


def tabled(problem: Tiled, device: Device) -> Plan | None:
    """Tell what the shipped tables hold, if it may run here."""
    found = ((each, _entry(each, problem)) for each in table.shipped(device))
    legal = ((of, own) for of, own in found if own and illegal(own.config, problem, device) is None)
    shipped, entry = next(legal, (None, None))
    if shipped is None or entry is None:
        return None
    how = "measured" if shipped.measured else "predicted and compiled, not measured,"
    of = shipped.device["name"]
    why = f"{how} for {'this GPU' if of == device.name else f'{of}, which is like it,'} in tritile's table"
    current = _table_counts(shipped, problem)
    why += ", of another version of the kernel" * (shipped.measured and not current)
    why += _other_triton(shipped, device)
    return Plan(problem, entry.config, "table", device, entry.us, why, current)


def _other_triton(shipped: table.Table, device: Device) -> str:
    """Say which Triton measured a table, where the one in use is another; else ""."""
    if not shipped.measured or shipped.triton in ("", device.triton):
        return ""
    return f"; measured with triton {shipped.triton}, in use is {device.triton}"


def _entry(shipped: table.Table, problem: Tiled) -> table.Entry | None:
    """What a table has for a problem, or else for the same of a call that need not be batch-invariant."""
    return shipped.find(problem) or shipped.find(_plainly(problem))


def _table_counts(shipped: table.Table, problem: Tiled) -> bool:
    """Tell whether a table's times are measurements of the kernels as they are."""
    entry = _entry(shipped, problem)
    kernel = FAMILIES[problem.op].get(entry.config.family) if entry is not None else None
    return kernel is not None and shipped.counts(problem.op, kernel.name, kernel.digest)


def likely(problem: Tiled, device: Device, count: int) -> list[Config]:
    """Return the configs of its class's portfolio predicted to be fastest; none where there is none."""
    name = class_of(problem)
    found = table.portfolio(name, device) if name is not None else None
    return [] if found is None else [config for _, config in found[0].ranked(problem, device, count)]


def foreseen(problem: Tiled, device: Device) -> Plan | None:
    """Return what its class's portfolio predicts to be fastest, None where there is none."""
    name = class_of(problem)
    found = table.portfolio(name, device) if name is not None else None
    if found is not None and not found[1].measured:
        return _shortlisted(problem, device, found[0])
    ranked = found[0].ranked(problem, device, 2) if found is not None else []
    if found is None or not ranked:
        return None
    (us, config), (portfolio, of, where) = ranked[0], found
    kernel = FAMILIES[problem.op][config.family]
    current = of.counts(problem.op, kernel.name, kernel.digest)
    behind = f"; the next is predicted to take {ranked[1][0] / us:.3f} times as long" if ranked[1:] else ""
    loss = portfolio.loss
    why = (
        f"predicted to be the fastest of the {len(portfolio.configs)} configs of {name}, {where}{behind}; at "
        f"{loss.sizes} sizes left out picks lost {loss.median:.1%} at the median, {loss.p95:.1%} at the 95th "
        "percentile" + "; measured with another version of the kernel" * (not current)
    )
    return Plan(problem, config, "predicted", device, us, why, current)


def _shortlisted(problem: Tiled, device: Device, portfolio: Portfolio) -> Plan | None:
    """Return what the model picks of a predicted portfolio's likeliest, None where none is legal."""
    likely = [config for _, config in portfolio.ranked(problem, device, RACED)]
    if not likely:
        return None
    config = model.likeliest(likely, problem, device)
    us = model.predict_us(config, problem, device)
    name, why = portfolio.name, "of its class nothing was measured on it"
    why = f"by the predicted portfolio of {name} for this GPU: {why}"
    return Plan(problem, config, "model", device, us, why, False)


def predicted(problem: Tiled, device: Device) -> Plan:
    """Tell what the model picks."""
    config = model.pick(problem, device)
    us = model.predict_us(config, problem, device)
    why = "the model's prediction, of all configs: no portfolio was asked, or none serves it"
    return Plan(problem, config, "model", device, us, why)


def interpreted(problem: Tiled) -> Plan:
    """Large tiles, as the interpreter's time goes by how many tile operations it runs."""
    why = "tensors in host memory are interpreted"
    family = next(iter(FAMILIES[problem.op].values()))
    if family.interpreted is not None:
        return Plan(problem, family.interpreted(problem), "interpreter", INTERPRETER, None, why)

    def block(size: int) -> int:
        return max(16, min(128, 1 << (size - 1).bit_length()))

    sides = [
        name for name, _ in next(iter(family.space())).kwargs if name != "GROUP_M"
    ]  # BLOCK_M is of `problem.m`
    blocks = {side: block(getattr(problem, side[-1].lower())) for side in sides}
    config = Config.of(family=family.name, **blocks, GROUP_M=8)
    return Plan(problem, config, "interpreter", INTERPRETER, None, why)


def _remembered(problem: Tiled, device: Device, mode: str) -> Plan | None:
    """Tell what is pinned, measured here, or ships: of a call with more choice too, but in mode "tune"."""
    fixed = pinned(problem, device)
    if fixed is not None and (fixed.current or mode != "strict"):
        return fixed
    asked = dict.fromkeys((problem, problem if mode == "tune" else _plainly(problem)))
    found = (_measured(problem, device, each) for each in asked)
    return next((plan for plan in found if plan is not None), None) or tabled(problem, device)


def _strictly(known: Plan | None, problem: Tiled, device: Device) -> Plan:
    """Return what is known, or foreseen, by measurements of the kernels as they are. Raises NotTunedError."""
    found = (known, foreseen(problem, device) if known is None or not known.current else None)
    plan = next((each for each in found if each is not None and each.current), None)
    if plan is None:
        raise NotTunedError(
            f"mode is strict, nothing measured is remembered for {problem.label} on {device.name}, and its "
            "class has no portfolio of measurements: run `tritile tune` for it, or with --calibrate, or use "
            "mode cached"
        )
    return plan


def _climb(problem: Tiled, device: Device, mode: str) -> Plan | None:
    """Return the first rung that holds; None where mode "tune" is to measure."""
    warn_untested()
    if mode == "tune" and is_frozen(device):
        mode = "cached"
    known = None if mode == "off" else _remembered(problem, device, mode)
    if mode == "strict":
        return _strictly(known, problem, device)
    if known is not None and not (mode == "tune" and known.source == "table"):
        return known
    if mode == "tune":
        return None
    return (foreseen(problem, device) if mode != "off" else None) or predicted(problem, device)


def plan_for(problem: Tiled, device: Device, mode: str | None = None) -> Plan | None:
    """Return the plan for a problem by the mode given, else the one in force.

    None only in mode "tune", for a problem that is to be measured first. Raises NotTunedError in mode
    "strict" for a problem of which nothing measured is remembered.
    """
    key = (problem, device, mode or current_mode())
    plan = _memo.get(key)
    if plan is None:
        plan = _climb(problem, device, key[2])
        if plan is not None:
            _memo[key] = plan
    return plan
