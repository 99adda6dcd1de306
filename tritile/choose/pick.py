"""Plan a problem: its config comes from the first of these sources that has one (`_chosen`).

1. The table that `TRITILE_TABLE` pins.
2. The store: measurements of exactly this problem on this GPU.
3. The shipped table: kinds of products that it leaves to torch's kernel, then measurements of exactly this
   problem on this GPU model or a similar one.
4. The predictor of the problem's class. Families with a margin compete by formulas of their own, which were
   fitted to measurements: no sweep times their configs beside the others (`_or_other_family`).
5. torch's kernel, on a GPU that no table serves: for products that torch makes in one launch, and is not
   known to be slow at (`aten.does_no_harm`).
6. The waves: each family's own estimate of its configs, by tiles and a roofline.

torch's kernel then takes its place if it is faster, or predicted to be as fast within 1% (`_or_aten`). Mode
"off" uses only the waves, and mode "strict" only measurements of the kernels as they are now. In mode "tune"
`plan_for` returns None for what 1 and 2 do not have, and `ops/request.py` has `tune/now.py` measure it.
"""

import logging
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, NamedTuple

import torch

from tritile.choose import aten, gpu_tables, waves
from tritile.choose.classes import class_of
from tritile.choose.predictor import Predictor
from tritile.choose.table import Table
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import HOST, Device
from tritile.core.forgetting import new_memo
from tritile.core.log import log
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import (
    AS_TORCH,
    PRECISIONS_OF,
    GroupedProblem,
    MatmulProblem,
    Product,
    QuantizedProblem,
    Tiled,
)
from tritile.core.settings import current_mode, uses_aten
from tritile.core.versions import warn_untested
from tritile.errors import NotTunedError, UnsupportedError
from tritile.families import numerics
from tritile.families.fp16x3.lowering import error_bound
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal
from tritile.families.work import workspace_bytes
from tritile.tuner import sync
from tritile.tuner.plan import Planned
from tritile.tuner.store.claims import Claim
from tritile.tuner.store.trial import TORCH, Trial, best_of
from tritile.tuner.store.trials import store_of

_NO_HARM: Final = "nothing was measured on this GPU model; tritile tune measures it"
_NO_PREDICTOR: Final = "no predictor covers this problem"
_HOPPER: Final = 90  # the GPUs for which the bound of fp16x3 is derived
_OTHERS: Final = 2  # configs of families with margins, which mode "tune" times
_SHOWN: Final = 5  # candidates of a plan
# The fastest of many predicted times is too short more often than the one of torch's kernel. At 577 aligned
# sizes that no sweep had, 1% gains 0.6% of the time; at the swept ones it loses up to 0.1% (tuning/NOTES.md).
_TIE: Final = 0.99


@dataclass(frozen=True, repr=False)
class Plan(Planned):
    """The config of a problem, and where it comes from. It prints as a table.

    Attributes:
        problem: what is computed; its `label` is a short name.
        config: the config that runs. Its family is "aten" for torch's own kernel.
        source: "exact" (measured here for exactly this problem), "pinned" (in the table of TRITILE_TABLE),
            "table" (shipped with tritile), "predicted" (by measurements at other sizes),
            "torch" (torch's own kernel: nothing was measured on this GPU model or one like it), "model" (by
            the family's own estimate: no problem of its class was measured, or mode is "off", or the call
            has only one config), "host" (tensors are in host memory, where torch computes) or
            "interpreter" (the same with TRITON_INTERPRET=1, where kernels are interpreted).
        device: the GPU of the plan.
        us: measured or predicted microseconds; None if the source has none.
        why: the source in words.
        current: False if the measurements are of another version of the kernel, or if a formula decided.
        other_us: microseconds of the backend that does not run, torch's or tritile's; None if unknown.
        other: where `other_us` comes from, in words.
        other_error: how far torch's time may be off, as a share of it, if it is predicted and tritile's
            kernel runs; else 0.0.
    """

    problem: Tiled
    config: Config
    current: bool = True
    other_us: float | None = None
    other: str = ""
    other_error: float = 0.0

    @property
    def candidates(self) -> tuple[tuple[float, Config], ...]:
        """Microseconds and config of what is predicted fastest, at most five, torch's kernel among them.

        () if nothing predicts such problems on this GPU, or if mode is "off".
        """
        if self.device == HOST or self.source == "model":
            return ()
        by_torch = self.config == aten.CONFIG or self.other_us is not None
        return tuple(candidates(self.problem, self.device, by_torch))

    @property
    def workspace(self) -> int:
        """Bytes of workspace that a call allocates while it runs; 0 in the interpreter."""
        by_torch = self.config == aten.CONFIG and not isinstance(self.problem, QuantizedProblem)
        if self.source == "interpreter" or by_torch:  # torch keeps cuBLAS's own
            return 0
        return workspace_bytes(call_for(self.problem), self.config, self.device)

    @property
    def _title(self) -> str:
        runs, other = "tritile's kernel", "torch's"
        if self.config == aten.CONFIG:
            runs, other = "torch's kernel", "tritile's"
        if self.us is not None and self.other_us is not None:
            is_measured = self.source in ("exact", "pinned", "table") and "predicted" not in self.other
            how = "measured" if is_measured else "predicted to be"
            runs += f", {how} {self.other_us / self.us:.2f} times as fast as {other}"
        return f"{super()._title}: {runs}"

    @property
    def _rows(self) -> tuple[tuple[str, str], ...]:
        (name, config), *more = super()._rows
        rows = ((name, "torch's kernel (aten)" if self.config == aten.CONFIG else config), *more)
        name = "tritile" if self.config == aten.CONFIG else "torch"
        if self.other_us is None and self.device != HOST and self.config != aten.CONFIG:
            why = aten.illegal(self.problem) or "not compared: `tritile bench` times both"
            rows = (*rows, (name, why))
        elif self.other_us is not None:
            behind = "" if self.us is None else f", {self.other_us / self.us:.2f} times as long"
            rows = (*rows, (name, f"{self.other_us:.1f} us{behind}: {self.other}"))
        found = self.candidates
        names = ["torch's kernel" if config == aten.CONFIG else str(config) for _, config in found]
        texts = [f"{us:.1f} us {name}" for (us, _), name in zip(found, names, strict=True)]
        rows = (*rows, *zip(["predicted", *[""] * len(texts)], texts, strict=False))
        rows = (*rows, ("memory", f"{self.workspace} bytes of workspace"))
        problem = self.problem
        if not isinstance(problem, MatmulProblem | GroupedProblem) or problem.dtype not in PRECISIONS_OF:
            return rows
        if self.source == "host":  # more precise than any of them
            return rows
        means = f"{problem.precision}: {numerics.meaning(problem.precision, problem.dtype)}"
        if problem.dtype == "float32" and isinstance(problem, MatmulProblem):
            means += f"; {error_words(problem.precision, problem.k, self.device.arch)}"
        return (*rows, ("means", means))


def error_words(precision: str, k: int, arch: int | str) -> str:
    """Return how far elements of a float32 product of K terms are from exact, on a GPU of an architecture."""
    if precision == "fp16x3" and arch == _HOPPER:
        return f"error within {error_bound(k):.0e} of |a| |b|"
    if precision == "tf32":
        return f"error about {2.0**-10:.0e} of |a| |b|"
    return "error at most torch's fp32" if precision == "ieee" else numerics.ERRORS[precision]


_memo: dict[tuple[Tiled, Device, str, bool], Plan] = new_memo()
_noted: dict[tuple[Tiled, Device, bool], Plan] = new_memo()  # for tritile.sync


def forget() -> None:
    """Drop every plan made so far in this process: after new measurements, plans may change."""
    _memo.clear()


def plan_for(
    problem: Tiled, device: Device, mode: str | None = None, allows_torch: bool = False
) -> Plan | None:
    """Return the plan of a problem in a mode, by default the one in force.

    `allows_torch`: torch's kernel is a candidate too, and the plan has the time of the backend that does not
    run. Return None only in mode "tune", for a problem to measure first, or that another process is
    measuring. Raises NotTunedError in mode "strict" if no measurement covers the problem, and
    UnsupportedError if only torch could compute it, but may not.
    """
    if problem.needs_torch:
        return _torch_only(problem, device, allows_torch)
    allows_torch = allows_torch and aten.is_compared(problem)
    key = (problem, device, mode or current_mode(), allows_torch)
    plan = _memo.get(key)
    if plan is not None:
        return plan
    since = perf_counter()
    warn_untested()
    plan = _chosen_alike(*key)
    if plan is not None:
        _memo[key] = plan
        facts = {"problem": problem.label, "config": str(plan.config), "source": plan.source}
        log("plan", logging.INFO, **facts, device=device.name, us=plan.us, seconds=perf_counter() - since)
    return plan


def _torch_only(problem: Tiled, device: Device, allows_torch: bool) -> Plan:
    fault = aten.illegal(problem)
    if fault is None and not allows_torch:
        fault = "tritile has no kernel of its own to plan, measure or compile"
        if not uses_aten():
            fault = 'backends is "triton": expected "triton,aten", in TRITILE_BACKENDS or tritile.mode'
    if fault is not None:
        raise UnsupportedError(f"only torch computes {problem.label}, but {fault}")
    lacks = "it"
    if isinstance(problem, MatmulProblem) and problem.precision == AS_TORCH:
        lacks = "what torch.backends.cuda.matmul.fp32_precision is set to"
    why = f"the only candidate, because tritile has no kernel for {lacks}"
    return Plan(problem, aten.CONFIG, "model", device, None, why)


def _kernels(problem: Tiled, allows_torch: bool) -> list[str]:
    """Return the digests of the kernels that may run a problem."""
    return [*(family.digest for family in FAMILIES[problem.op].values()), *([TORCH] if allows_torch else [])]


def note_choice(plan: Plan, allows_torch: bool) -> None:
    """Note for `tritile.sync` what a call runs. `allows_torch`: as for `plan_for`."""
    problem, device = plan.problem, plan.device
    key = problem, device, allows_torch
    if problem.needs_torch or _noted.get(key) is plan:
        return
    _noted[key] = plan
    allows_torch = allows_torch and aten.is_compared(problem)

    def remembered() -> sync.Choice | None:
        found = _chosen(problem, device, "tune", allows_torch)
        found = found or _chosen(problem, device, "cached", allows_torch)  # torch was not timed
        is_measured = found is not None and found.source in ("exact", "pinned")
        return sync.Choice(found.config, found.source) if found and is_measured else None

    choice = sync.Choice(plan.config, plan.source)
    sync.note(device, _kernels(problem, allows_torch), problem, choice, remembered)


def _chosen_alike(problem: Tiled, device: Device, mode: str, allows_torch: bool) -> Plan | None:
    """Return what the ranks agreed on in `tritile.sync`, else the plan of the first source that has one."""
    agreed = None if mode == "off" else sync.agreed(device, _kernels(problem, allows_torch), problem)
    if agreed is None or (mode in ("tune", "strict") and agreed.source not in sync.MEASURED):
        return _chosen(problem, device, mode, allows_torch)
    config = agreed.config
    fault = aten.illegal(problem) if config == aten.CONFIG else illegal(config, problem, device)
    if fault is not None or (config == aten.CONFIG and not allows_torch):
        return _chosen(problem, device, mode, allows_torch)
    plan = _chosen(problem, device, "cached" if mode == "tune" else mode, allows_torch)
    if plan is not None and plan.config == config:
        return plan
    return Plan(problem, config, agreed.source, device, None, sync.WHY)


def _chosen(problem: Tiled, device: Device, mode: str, allows_torch: bool) -> Plan | None:
    """Return the plan of the first source that has one, or by torch's kernel if that is faster.

    None if mode "tune" is to measure.
    """
    if mode == "off":
        return by_model(problem, device, "mode is off")
    is_open = mode == "tune" and claim_on(problem, device).is_open()  # before the store is read
    found = trials(problem, device, *([TORCH] if allows_torch else []))  # the store is opened once for both
    own = None if is_open else _fastest(found, problem, device)
    plan = _first(_pinned(problem, device, mode), own)
    if plan is None and mode != "tune":
        plan = _unmeasured(problem, device, mode, allows_torch)
    if plan is None or not allows_torch:
        return plan
    return _or_aten(plan, mode, [trial for trial in found if trial.config == aten.CONFIG])


def _unmeasured(problem: Tiled, device: Device, mode: str, allows_torch: bool) -> Plan:
    """Return the plan of the first source that has one, if just this problem was not measured here.

    A batch-invariant call may take what was measured without batch invariance.
    """
    for other in _with_free(problem)[1:]:
        if plan := _fastest(trials(other, device), problem, device):
            return plan
    plan = tabled(problem, device)
    if allows_torch and (plan is None or _torch_measured(plan, None, []) is None):
        plan = _by_rule(problem, device) or plan
    if mode == "strict":
        if plan is None or not plan.current:
            plan = by_predictor(problem, device)
        if plan is None or not plan.current:
            raise NotTunedError(
                f"mode is strict, and no measurement covers {problem.label} on {device.name}: run `tritile "
                "tune` for this problem, or with --calibrate for its class, or use mode cached"
            )
        return plan
    if plan is not None:
        return plan
    plan = by_predictor(problem, device)
    if plan is not None:
        return _or_other_family(plan)
    if allows_torch and not gpu_tables.has_table(device) and aten.does_no_harm(problem, device):
        return Plan(problem, aten.CONFIG, "torch", device, None, _NO_HARM)
    return by_model(problem, device, _NO_PREDICTOR)


# --- Measurements of just this problem: the store and the tables ---


def _with_free(problem: Tiled) -> tuple[Tiled, ...]:
    """Return a problem and the same without batch invariance: more of those are measured."""
    if isinstance(problem, PermuteProblem) or not problem.invariant:
        return (problem,)
    return problem, replace(problem, invariant=False)


def trials(problem: Tiled, device: Device, *more: str) -> list[Trial]:
    """Return what was measured here of a problem with tritile's kernels, and with those of more digests."""
    first, *others = _kernels(problem, False)
    return store_of(device).trials(first, problem, *others, *more)


def claim_on(problem: Tiled, device: Device) -> Claim:
    """Return the claim on searches of a problem; while one is open, what the store has of it is a part."""
    digest = next(iter(FAMILIES[problem.op].values())).digest
    return Claim(store_of(device), digest, problem)


def _fastest(measured: list[Trial], problem: Tiled, device: Device) -> Plan | None:
    """Return the plan by the fastest legal config of trials, None if there is none."""
    works = (trial for trial in measured if trial.works)
    legal = [trial for trial in works if illegal(trial.config, problem, device) is None]
    best = best_of(legal)
    if best is None:
        return None
    why = f"the fastest of {len(legal)} configs measured on {device.name}"
    return Plan(problem, best.config, "exact", device, best.us, why)


def _of_table(table: Table, problem: Tiled, device: Device, source: str, why: str) -> Plan | None:
    """Return what a table holds for a problem, or for it without batch invariance, if that is legal here."""
    entry = next(filter(None, map(table.find, _with_free(problem))), None)
    if entry is None or illegal(entry.config, problem, device) is not None:
        return None
    current = table.is_current(problem.op, entry.config.family)
    if not current:
        why += ", with another version of the kernel"
    if source == "table" and table.triton not in ("", device.triton):
        why += f"; measured with Triton {table.triton}, but {device.triton} is in use"
    return Plan(problem, entry.config, source, device, entry.us, why, current)


def _pinned(problem: Tiled, device: Device, mode: str) -> Plan | None:
    table = gpu_tables.pinned(device)
    plan = _of_table(table, problem, device, "pinned", "measured, in the pinned table") if table else None
    return plan if plan is None or plan.current or mode != "strict" else None


def _first(pinned: Plan | None, own: Plan | None) -> Plan | None:
    """Return the pinned plan, which says what it hides, or the one measured here if the table has no time."""
    if pinned is None or own is None:
        return pinned or own
    if pinned.us is None:
        return own
    if own.config == pinned.config:
        return pinned
    return replace(
        pinned, why=f"{pinned.why}; not used is {own.config}, {own.us:.1f} us measured on {own.device.name}"
    )


def tabled(problem: Tiled, device: Device) -> Plan | None:
    """Return what the shipped tables hold; None if they hold nothing that is legal here."""
    for table in gpu_tables.shipped(device):
        of = table.device["name"]
        what = of if of == device.name else f"a similar GPU, {of}"
        plan = _of_table(table, problem, device, "table", f"measured on {what}, in tritile's table")
        if plan is not None:
            return plan
    return None


# --- torch's own kernel ---


def _by_rule(problem: Tiled, device: Device) -> Plan | None:
    """Return the plan by torch's kernel of a kind of products that it makes if nothing is measured."""
    if not isinstance(problem, Product) or gpu_tables.pinned(device) is not None:
        return None
    kind = aten.kind_of(problem)
    if not gpu_tables.is_by_aten(kind, device) or aten.illegal(problem) is not None:
        return None
    why = f"tritile's table of {device.name} leaves products of {kind} to torch's kernel"
    return Plan(problem, aten.CONFIG, "table", device, None, why)


class _TorchTime(NamedTuple):
    us: float
    source: str
    where: str
    margin: float = 1.0  # how many times as long the other config has to take for torch's kernel to run
    error: float = 0.0  # the share by which a predicted time may be off
    is_least: bool = False  # it may take far longer


def _or_aten(plan: Plan, mode: str, measured: list[Trial]) -> Plan | None:
    """Return the plan with torch's time, or one by torch's kernel if that is faster.

    `measured`: trials of torch. A pinned table keeps torch's kernel out. None if mode "tune" is to time
    torch first: once, as a timing that fails is remembered too.
    """
    problem, device = plan.problem, plan.device
    if plan.config == aten.CONFIG or not isinstance(problem, Product | QuantizedProblem):
        return plan
    pinned = gpu_tables.pinned(device)
    torch_time = _torch_measured(plan, pinned, measured)
    if torch_time is None and mode == "tune" and pinned is None:
        return plan if measured else None
    torch_time = torch_time or _torch_predicted(problem, plan)
    if torch_time is None:
        return plan
    is_slower = plan.us is not None and plan.us >= torch_time.margin * torch_time.us
    is_slower = is_slower and not torch_time.is_least
    if is_slower and pinned is not None:
        plan = replace(plan, why=f"{plan.why}; torch's kernel is faster, but a pinned table keeps it out")
    if not is_slower or pinned is not None or aten.illegal(problem) is not None:
        return replace(plan, other_us=torch_time.us, other=torch_time.where, other_error=torch_time.error)
    ours, why = f"{plan.config}, {plan.why}", f"torch's kernel, {torch_time.where}"
    return Plan(
        problem, aten.CONFIG, torch_time.source, device, torch_time.us, why, other_us=plan.us, other=ours
    )


def _torch_measured(plan: Plan, pinned: Table | None, measured: list[Trial]) -> _TorchTime | None:
    trial = best_of(measured)
    if trial is not None and trial.us:
        return _TorchTime(trial.us, "exact", f"measured on {plan.device.name}")
    tables: tuple[Table, ...] = ()
    if plan.source == "pinned" and pinned is not None:
        tables, where = (pinned,), "the pinned table"
    elif plan.source == "table":
        tables, where = gpu_tables.shipped(plan.device), "tritile's table"
    for table in tables:
        entry = table.find(plan.problem) if table.device["name"] == plan.device.name else None
        if entry is not None and entry.torch_us:
            return _TorchTime(entry.torch_us, plan.source, f"measured on {plan.device.name}, in {where}")
    return None


def _torch_predicted(problem: Product | QuantizedProblem, plan: Plan) -> _TorchTime | None:
    """Return torch's time as it is predicted, whatever version of torch was timed: the plan names it."""
    product, device = aten.product_of(problem), plan.device
    if plan.source == "model" or not isinstance(product, MatmulProblem) or not aten.matches_sweeps(product):
        return None
    served = _served(product, device)
    if served is None:
        return None
    made, name, _ = served
    us = made.torch_us(name, product, device)
    if us is None:
        return None
    error = made.classes[name].loss.torch
    where = f"predicted, typically within {error:.0%} on held-out sizes"
    if torch.version.cuda is not None and (used := aten.versions()) != dict(made.versions):
        timed, now = (aten.version_words(each) for each in (made.versions, used))
        where += f"; {timed} was timed, and {now} is in use"
    is_least = made.is_least(name, product)
    if is_least:
        where += "; it may take far longer at sizes beyond those that were timed"
    margin = _TIE if plan.source == "predicted" else 1 + error
    us += aten.unpack_us(problem, device)
    return _TorchTime(us, "predicted", where, margin, error, is_least)


# --- Predictions ---


def _served(problem: Tiled, device: Device) -> tuple[Predictor, str, str] | None:
    """Return what predicts a problem, its class, and where that is from; None if nothing does."""
    name = class_of(problem)
    found = gpu_tables.predictor(name, device)
    return None if found is None or name is None else (found[0], name, found[1])


def likely(problem: Tiled, device: Device, count: int) -> list[Config]:
    """Return a class's `count` fastest configs, and up to two of families with margins.

    All are by prediction. Return [] for a class without a predictor.
    """
    served = _served(problem, device)
    if served is None:
        return []
    made, name, _ = served
    ranked = [config for _, config in made.ranked(name, problem, device, count)]
    if few := of_few_rows(problem, device):
        ranked.insert(0, few)
    others = waves.with_margins(problem, device, _families(made, name))[:_OTHERS]
    return list(dict.fromkeys((*ranked, *others)))


def _families(made: Predictor, name: str) -> frozenset[str]:
    return frozenset(config.family for config in made.configs(name))


def by_predictor(problem: Tiled, device: Device) -> Plan | None:
    """Return the config that is predicted to be fastest; None for a class without a predictor."""
    served = _served(problem, device)
    if served is None:
        return None
    if few := of_few_rows(problem, device):
        return Plan(problem, few, "predicted", device, None, _FEW_ROWS)
    made, name, where = served
    ranked = made.ranked(name, problem, device, 2)
    if not ranked:
        return None
    us, config = ranked[0]
    behind = ""
    if ranked[1:] and ranked[1][0] >= us:  # one that comes last may be predicted to be faster
        behind = f"; the next is predicted to take {ranked[1][0] / us:.3f} times as long"
    loss, current = made.classes[name].loss, made.is_current(name, config)
    why = (
        f"predicted to be the fastest of the {len(made.classes[name].columns)} configs of {name}, {where}"
        f"{behind}; on {loss.sizes} held-out sizes this choice was on average {loss.mean:.1%} slower than "
        f"the best (95th percentile: {loss.p95:.1%})"
    )
    if not current:
        why += "; measured with another version of the kernel"
    return Plan(problem, config, "predicted", device, us, why, current)


# Batch-invariant products of few rows: the rows and columns of their tiles, and the least K.
_ROWS: Final = 64
_COLUMNS: Final = 16, 32
_LEAST_K: Final = 512
_FEW_ROWS: Final = "of batch-invariant products of few rows, narrow tiles that all run at once are fastest"


def of_few_rows(problem: Tiled, device: Device) -> Config | None:
    """Return the config of a batch-invariant product of 16-bit types and few rows on Hopper, else None.

    No sweep times these: other products of few rows share K among programs. Without that, a product takes as
    long as one program, which is least with narrow tiles that all run at once, and take half of the SMs or
    more (`tuning/NOTES.md`).
    """
    if not (isinstance(problem, MatmulProblem) and problem.invariant and device.nvidia == 90):
        return None
    core = problem.core
    if class_of(problem) not in ("bf16_nn", "bf16_nt") or core.m > _ROWS or core.k < _LEAST_K:
        return None
    for columns in _COLUMNS:
        tiles = core.batch * -(-core.n // columns)
        if device.processors <= 2 * tiles <= 2 * device.processors:
            config = Config.of(4, 4, "tile", BLOCK_M=_ROWS, BLOCK_N=columns, BLOCK_K=256, GROUP_M=1)
            if illegal(config, problem, device) is None:
                return config
    return None


def _or_other_family(plan: Plan) -> Plan:
    """Return a predicted plan, or that of a family with a margin, if that is faster by its margin."""
    problem, device, us = plan.problem, plan.device, plan.us
    if all(FAMILIES[problem.op][name].margin is None for name in contenders(problem)):
        return plan
    served = _served(problem, device)
    swept = _families(*served[:2]) if served is not None else frozenset()
    config = next(iter(waves.with_margins(problem, device, swept)), None)
    if config is None or us is None or config.family == plan.config.family:
        return plan
    own, margin = waves.predict_us(config, problem, device), FAMILIES[problem.op][config.family].margin
    if margin is None or us < margin * own:
        return plan
    why = f"predicted by the formula of {config.family}, which was fitted to measurements at other sizes; "
    why += f"{plan.config} is predicted to take {us:.1f} us"
    return replace(plan, config=config, us=own, why=why, current=False)


def candidates(problem: Tiled, device: Device, allows_torch: bool) -> list[tuple[float, Config]]:
    """Return microseconds and config of what is predicted fastest, at most five, torch's kernel among them.

    A tie within 1% is torch's. Families with margins are left out: their formulas are of another kind. []
    without a predictor.
    """
    served = _served(problem, device)
    if served is None:
        return []
    made, name, _ = served
    ranked = made.ranked(name, problem, device, _SHOWN)
    if allows_torch and gpu_tables.pinned(device) is None and aten.illegal(problem) is None:
        assert isinstance(problem, Product | QuantizedProblem)
        by_torch = _torch_predicted(problem, Plan(problem, aten.CONFIG, "predicted", device, None, ""))
        ranked += [(by_torch.us, aten.CONFIG)] if by_torch and not by_torch.is_least else []
    tied = {aten.CONFIG: _TIE}
    return sorted(ranked, key=lambda pair: pair[0] * tied.get(pair[1], 1.0))[:_SHOWN]


def by_model(problem: Tiled, device: Device, reason: str) -> Plan:
    why = f"estimated to be the fastest of all legal configs, because {reason}"
    return _by_model(waves.pick(problem, device), problem, device, why)


def _by_model(config: Config, problem: Tiled, device: Device, why: str, current: bool = True) -> Plan:
    return Plan(problem, config, "model", device, waves.predict_us(config, problem, device), why, current)


# --- Host memory ---


def on_host(problem: Tiled) -> Plan:
    """Return the plan for tensors in host memory: torch computes, and none of tritile's kernels runs."""
    return Plan(problem, aten.CONFIG, "host", HOST, None, "tensors are in host memory, where torch computes")


def interpreted(problem: Tiled) -> Plan:
    """Return a plan for the interpreter: large tiles, as its time grows with their number."""
    family = next(iter(FAMILIES[problem.op].values()))

    def block(size: int) -> int:
        return max(16, min(128, 1 << (size - 1).bit_length()))

    if family.interpreted is not None:
        config = family.interpreted(problem)
    else:
        sides = [name for name, _ in next(iter(family.space())).kwargs if name != "GROUP_M"]
        # BLOCK_M is for `problem.m`
        blocks = {side: block(getattr(problem, side[-1].lower())) for side in sides}
        config = Config.of(family=family.name, **blocks, GROUP_M=8)
    return Plan(problem, config, "interpreter", HOST, None, "TRITON_INTERPRET is set")
