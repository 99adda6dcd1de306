"""The kernels that calls need: with one weight at any number of rows, or of one class at any sizes."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, GroupedProblem, MatmulProblem, PermuteProblem, Tiled, alignment
from tritile.core.problem.epilogue import SIDES, epilogue_of
from tritile.core.views import posed
from tritile.errors import InvalidValueError
from tritile.families import numerics
from tritile.families.common.work import Descriptor
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, invariant
from tritile.families.work import early, work_of
from tritile.planning import gpu_tables, model, plans
from tritile.planning.classes import class_of
from tritile.planning.store import store_of
from tritile.tune.deploy.fill import Entry

_Others = PermuteProblem | GroupedProblem  # problems that are no product of two matrices
# Sizes that differ in all that tells kernels of one config apart: whether blocks divide them, whether 16
# does, whether few tiles are made, whether K is long enough to be shared by many programs, and which operands
# are copied.
_ROWS: Final = (1, 7, 64, 301, 640, 1000, 4096, 5003, 20008)
_COLUMNS: Final = (40, 48, 256, 264, 1392, 5000, 6160, 8192, 16392)
_DEPTHS: Final = (72, 208, 1024, 4104, 30000, 30008, 32768)
# What tells kernels of few rows apart: their number, how wide rows of the matrix can be read, whether K is
# whole words, whether sizes and strides are multiples of 16, and whether programs share K.
_FEW: Final = 1, 2, 4, 8
_NARROW: Final = 264, 265, 266, 268, 272
_SHORT: Final = 3, 72, 73, 1000, 1024
# The same of odd rows by tensor cores: rows of a tile, and a K that any number of programs may share.
_TILED: Final = tuple(itertools.product((16, 24, 32, 40, 64, 72, 120, 128, 248, 256), (264, 272), (40_000,)))


def _kind(value: Any) -> Any:
    """Reduce an argument to what may decide the compiled code: of integers 1, multiples of 16, others."""
    if isinstance(value, Descriptor):  # Triton compiles none of its sizes and strides in
        return value.buffer, value.block, value.layout, value.rounded
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return "one" if value == 1 else (value % 16 == 0, value >= 2**31)
    return value


def _kind_for(param: Any, value: Any) -> Any:
    """Reduce an argument to what may decide the compiled code at this parameter."""
    if param.is_constexpr or not isinstance(value, int):
        return value if param.is_constexpr else _kind(value)
    if param.do_not_specialize:
        return value >= 2**31
    return _kind(value) if value == 1 or not param.do_not_specialize_on_alignment else value >= 2**31


_posed: Final = functools.lru_cache(1024)(posed)  # each config of a class takes all of its sizes in turn


@functools.cache
def _params(kernel: Any) -> dict[str, Any]:
    return {param.name: param for param in kernel.params}


def _compiled(problem: Tiled, config: Config, device: Device) -> tuple[Any, ...]:
    """Return a value that is equal for two calls which launch the same kernels."""
    steps = []
    for step in work_of(_posed(problem), config, device.processors, early(device)).steps:
        params = _params(step.kernel)
        args = (_kind_for(params[name], value) for name, value in step.args.items())
        steps.append((step.kernel, *args, *step.options.items()))
    return tuple(steps)


def _distinct(asked: Iterable[Entry], device: Device) -> Iterator[Entry]:
    """Yield the first of all entries that launch the same kernels."""
    seen = set()
    for problem, config in asked:
        key = config, _compiled(problem, config, device)
        if key not in seen:
            seen.add(key)
            yield problem, config


def _planned(problems: Iterable[Tiled], device: Device, mode: str) -> Iterator[Entry]:
    for problem in problems:
        plan = plans.plan_for(problem, device, mode)
        assert plan is not None
        yield problem, plan.config


def _with_one_row(epilogue: str) -> str:
    """Return the epilogue for a result of one row: its operands do not differ by row."""
    fused, alone = epilogue_of(epilogue), {"full": "row", "column": "one"}
    sides = {name: alone.get(how, how) for name in SIDES if (how := getattr(fused, name))}
    return str(replace(fused, **sides))


def _fused_at(problem: MatmulProblem, m: int) -> str:
    """Return the epilogue of the same call with another number of rows.

    Raises InvalidValueError where a call of one row does not tell whether its residual differs by row.
    """
    if m == 1:
        return _with_one_row(problem.epilogue)
    if problem.m == 1 and epilogue_of(problem.epilogue).residual:
        raise InvalidValueError(f"{problem.label}: its residual may differ by row: give two rows or more")
    return problem.epilogue


def _with_rows(problem: Any, m: int) -> Any:
    """Return the problem of the same call with another number of rows.

    A single row is aligned as its tensor is, whatever its stride. Columns have no gaps.
    """
    if not isinstance(problem, MatmulProblem):
        return replace(problem, m=m)

    def alignment_of(layout: str, row: int, itemsize: int, now: int) -> int:
        if layout == "column":
            return alignment(m * itemsize)
        if layout == "strided" or problem.batch > 1 or (m == 1) == (problem.m == 1):
            return now
        return 16 if m == 1 else alignment(row * itemsize)

    return replace(
        problem,
        m=m,
        epilogue=_fused_at(problem, m),
        a_align=alignment_of(problem.a_layout, problem.k, problem.itemsize, problem.a_align),
        out_align=alignment_of(problem.out_layout, problem.n, ITEMSIZE[problem.out_dtype], problem.out_align),
    )


def _sized(problem: Any, m: int, n: int, k: int) -> Any:
    """Return the problem of the same call with other sizes and the same alignments."""
    fused = {"epilogue": _fused_at(problem, m)} if isinstance(problem, MatmulProblem) else {}
    return replace(problem, m=m, n=n, k=k, **fused)


def of_rows(problem: Tiled, rows: Iterable[int], device: Device, mode: str = "cached") -> Iterator[Entry]:
    """Yield problems with their configs that cover all kernels of a call at these numbers of rows.

    Each number is planned as a call plans it in this mode, which is not "tune". Raises InvalidValueError
    where the problem is no product of two matrices, or `rows` are no numbers of rows.
    """
    if isinstance(problem, _Others):
        raise InvalidValueError(f"rows of {problem.label}: wanted a product of two matrices")
    numbers = list(rows) if isinstance(rows, Iterable) else []
    if not numbers or not all(type(m) is int and m >= 1 for m in numbers):
        raise InvalidValueError(f"rows={rows!r}: wanted whole numbers, 1 and more")
    alike = (_with_rows(problem, m) for m in numbers)
    # Whether the precision of `problem` was named is not known: a call may ask for either.
    asked = itertools.chain.from_iterable((each, numerics.unnamed(each, device)) for each in alike)
    return _distinct(_planned(dict.fromkeys(asked), device, mode), device)


def _remembered(problem: Tiled, device: Device) -> list[Tiled]:
    """Return the stored and tabled problems that differ from this one in sizes only."""
    digests = [family.digest for family in FAMILIES[problem.op].values()]
    known = [trial.problem for each in digests for trial in store_of(device).bests(each, problem.op)]
    for found in (gpu_tables.pinned(device), *gpu_tables.shipped(device)):
        known += [entry.problem for entry in found.entries] if found is not None else []
    return [other for other in known if isinstance(other, Tiled) and other.kind == problem.kind]


def _beside(problem: Tiled, device: Device) -> Iterator[Entry]:
    """Yield problems of the same call, with each config that no portfolio holds."""
    alike: list[Tiled] = [problem]
    if isinstance(problem, MatmulProblem):
        sizes = (*itertools.product(_FEW, _NARROW, _SHORT), *_TILED)
        for few, many, k in sizes:
            alike += (_sized(problem, few, many, k), _sized(problem, many, few, k))
    yield from ((each, config) for each in alike for config in model.beside(each, device))


def of_class(problem: Tiled, device: Device, mode: str = "cached") -> Iterator[Entry]:
    """Yield problems with their configs that cover all kernels of a call at any sizes.

    Calls run with a config of their class's portfolio, with one beside it, or with the config remembered
    for just their size. A permutation keeps its sizes. Where the class has no portfolio, the problem's own
    config is all.
    """
    name = class_of(problem)
    found = gpu_tables.portfolio(name, device) if name is not None and mode != "off" else None
    if found is None:
        return _planned([problem], device, mode)
    alike: list[Tiled] = [problem]
    if not isinstance(problem, _Others):
        alike += (_sized(problem, m, n, k) for m in _ROWS for n in _COLUMNS for k in _DEPTHS)
    same = _remembered(problem, device)
    met = (numerics.in_one_way(each) if invariant(problem) else each for each in same)
    remembered = itertools.chain(_planned([problem], device, mode), _planned(met, device, "cached"))
    members = ((each, config) for config in found[0].configs for each in alike)
    legal = (entry for entry in members if illegal(entry[1], entry[0], device) is None)
    return _distinct(itertools.chain(remembered, legal, _beside(problem, device)), device)
