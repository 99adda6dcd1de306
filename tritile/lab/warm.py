"""`tritile.warm`: compile the kernels of later calls into Triton's cache, in parallel processes.

Triton finds a kernel by a key of its source, options, target and compiler. The kernels are compiled by the
code that a call runs, so that their keys and contents are those that the call looks up.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from typing import Any, Final

import torch
from triton import knobs

from tritile.choose import aten, gpu_tables, pick, waves
from tritile.choose.classes import class_of
from tritile.core.config import Config
from tritile.core.device import HOST, Device
from tritile.core.epilogue import SIDES
from tritile.core.fields import alignment
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import ITEMSIZE, GroupedProblem, MatmulProblem, QuantizedProblem, Tiled
from tritile.core.settings import current_mode, uses_aten
from tritile.errors import (
    InvalidValueError,
    NotCompiledError,
    NotTunedError,
    TritileError,
    TuningError,
    UnsupportedError,
    brief,
    is_bug,
)
from tritile.families import numerics
from tritile.families.launching import compiles_for
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.ops.plan import IN_PLACE, plan_call
from tritile.runtime.ahead import compiling_for
from tritile.runtime.compiles import compiles_refused, refuse_if_strict
from tritile.tuner.adoption import tuner_for
from tritile.tuner.arguments import check_keywords
from tritile.tuner.autotuner import Autotuner
from tritile.tuner.measure.shipping import stood_in
from tritile.tuner.measure.workers import COMPILE_LIMIT_S, WorkerPool
from tritile.tuner.store.trials import store_of

# Numbers of rows that between them need every kernel of a config: which one is needed depends on whether it
# is a single row, 16 and the blocks divide it, the tiles run at once, and which operands are copied first.
_MORE: Final = 16, 24, 40, 64, 72, 120, 128, 248, 256, 301, 512, 640, 1000, 2048, 4096, 5003, 20008
ROWS: Final = *range(1, 10), *_MORE

Calls = dict[Config, list[Tiled]]  # what is compiled: a config, with problems that run it


def check_nvidia(device: Device) -> None:
    if device.backend != "cuda":
        raise UnsupportedError(
            f"{device.name}: kernels are compiled ahead for NVIDIA GPUs only. For AMD GPUs Triton compiles "
            "other code for tensors below 2 GiB, and a problem does not hold that size"
        )


# --- What calls launch ---


def _at_rows(problem: Any, m: int) -> Any:
    """Return the problem of the same call with another number of rows.

    A single row is aligned as its tensor is, whatever its stride. Columns have no gaps. Raises
    InvalidValueError if a call of one row does not say whether its residual differs by row.
    """
    if not isinstance(problem, MatmulProblem):
        return replace(problem, m=m)
    epilogue = problem.epilogue
    if m == 1:  # one row's epilogue does not differ by row
        single = {"full": "row", "column": "one"}
        spreads = {side: spread for side in SIDES if (spread := getattr(epilogue, side))}
        epilogue = replace(epilogue, **{side: single.get(spread, spread) for side, spread in spreads.items()})
    elif problem.m == 1 and epilogue.residual:
        raise InvalidValueError(f"{problem.label}: its residual may differ by row: give two rows or more")

    def alignment_of(layout: str, row_bytes: int, size: int, now: int) -> int:
        if layout == "column":
            return alignment(m * size)
        if layout == "strided" or problem.batch > 1 or (m == 1) == (problem.m == 1):
            return now
        return 16 if m == 1 else alignment(row_bytes)

    size, out_size = problem.itemsize, ITEMSIZE[problem.out_dtype]
    a_align = alignment_of(problem.a_layout, problem.k * size, size, problem.a_align)
    out_align = alignment_of(problem.out_layout, problem.n * out_size, out_size, problem.out_align)
    return replace(problem, m=m, epilogue=epilogue, a_align=a_align, out_align=out_align)


def _planned(problem: Tiled, device: Device, mode: str) -> Config:
    chosen = pick.plan_for(problem, device, mode)
    assert chosen is not None  # only mode "tune" returns None
    return chosen.config


def _with_any_rows(problem: Tiled, device: Device) -> Iterator[tuple[Config, Tiled]]:
    """Yield what calls with any number of rows run.

    That is a config of their class, one of a family with a margin, or the config that is remembered for just
    their size.
    """
    by_rows: list[Any] = [_at_rows(problem, m) for m in ROWS]
    for row_problem in by_rows:
        name = class_of(row_problem)
        served, few = gpu_tables.predictor(name, device), pick.of_few_rows(row_problem, device)
        configs = (
            *([few] if few else []),
            *(served[0].configs(name) if served and name else ()),
            *waves.with_margins(row_problem, device)[:1],
        )
        legal = (config for config in configs if illegal(config, row_problem, device) is None)
        yield from ((config, row_problem) for config in legal)
    first, among = by_rows[0], {replace(one, m=1) for one in by_rows}
    digests = [family.digest for family in FAMILIES[first.op].values()]
    remembered = [trial.problem for digest in digests for trial in store_of(device).bests(digest, first.op)]
    for table in (gpu_tables.pinned(device), *gpu_tables.shipped(device)):
        remembered += [entry.problem for entry in table.entries] if table is not None else []
    for other in dict.fromkeys(remembered):
        if isinstance(other, type(first)):
            called = numerics.as_invariant(other) if first.invariant else other
            if replace(called, m=1) in among:
                yield _planned(called, device, "cached"), called


def calls_of(problem: Tiled, device: Device, any_rows: bool = False) -> Calls:
    """Return the configs that calls of a problem run in this mode, in "tune" those of "cached".

    Those of "cached" serve a process in mode "strict", too. `any_rows`: of products of two matrices whose
    class has a predictor, with any number of rows. Raises NotTunedError in mode "strict" if nothing was
    measured.
    """
    mode = "cached" if current_mode() == "tune" else current_mode()
    calls: Calls = {_planned(problem, device, mode): [problem]}
    if mode == "cached":
        with contextlib.suppress(NotTunedError):
            calls[_planned(problem, device, "strict")] = [problem]
    if isinstance(problem, QuantizedProblem) and uses_aten() and aten.illegal(problem) is None:
        planned = pick.plan_for(problem, device, mode, True)
        if any_rows or (planned is not None and planned.config == aten.CONFIG):
            calls[aten.CONFIG] = [problem]  # whatever its rows, the weight is unpacked by one kernel
    name, is_sized = class_of(problem), not isinstance(problem, PermuteProblem | GroupedProblem)
    if any_rows and mode != "off" and is_sized and gpu_tables.predictor(name, device):
        for config, row_problem in _with_any_rows(problem, device):
            calls.setdefault(config, []).append(row_problem)
    return calls


# --- Compiling ---


def _compiled(
    problems: Iterable[Tiled], config: Config, device: Device, folder: str, strict: bool
) -> tuple[set[str], str | None]:
    """Compile what these problems launch with a config into a cache; run in a process of a pool.

    Returns Triton's hashes of the kernels, and why one of them cannot be had: `strict` refuses to compile.
    """
    refused = compiles_refused("a kernel", "run this in another mode") if strict else contextlib.nullcontext()
    hashes = set[str]()
    with knobs.cache.scope(), compiling_for(device), refused:
        knobs.cache.dir = folder
        try:
            for problem in problems:
                hashes.update(compiled().hash for compiled in compiles_for(problem, config, device))
        except NotCompiledError:
            return hashes, "is not compiled"
        except Exception as error:  # a config that does not fit may raise many kinds
            if is_bug(error):
                raise
            return hashes, brief(error)
    return hashes, None


def compile_calls(
    calls: Mapping[Config, Sequence[Tiled]], device: Device, done: Callable[[str], None] = lambda label: None
) -> tuple[set[str], list[str]]:
    """Compile what calls launch into Triton's cache on disk, TRITON_CACHE_DIR; no such GPU is needed.

    `done` is called with a label for each config. Returns Triton's hashes of the kernels that are there, and
    a line for each config with a kernel that is missing. In mode "strict" nothing is compiled. Raises
    UnsupportedError for a GPU that is not NVIDIA's, TuningError if TRITON_INTERPRET is set.
    """
    check_nvidia(device)
    if knobs.runtime.interpret:
        raise TuningError("TRITON_INTERPRET is set, so nothing can be compiled: unset it")
    folder, strict = str(knobs.cache.dir), current_mode() == "strict"
    kernels, reasons = set[str](), list[str]()
    with WorkerPool() as pool:
        futures = {}
        for config, problems in calls.items():
            once = list(dict.fromkeys(problems))
            limit_s = COMPILE_LIMIT_S * min(len(problems), 8)  # few of the problems take kernels of their own
            future = pool.submit(_compiled, once, config, device, folder, strict, limit_s=limit_s)
            futures[future] = f"{problems[0].label} with {config}"
        for future in as_completed(futures):
            label, error = futures[future], future.exception()
            hashes, reason = (set[str](), str(error)) if error is not None else future.result()
            kernels |= hashes
            reasons += [f"{label}: {reason}"] if reason else []
            done(label)
    return kernels, sorted(reasons)


def warm(
    what: Callable[..., Any] | str | Tiled | Autotuner,
    *args: Any,
    any_rows: bool = False,
    device: Device | torch.device | str | None = None,
    **kwargs: Any,
) -> int:
    """Compile in parallel processes the kernels of a call; return how many there are.

    Kernels go to Triton's cache on disk (TRITON_CACHE_DIR), where calls find them; cached ones count too. In
    mode "strict" nothing is compiled: this says whether such calls would find all that they need.

    Args:
        what: the operation or its name, followed by the arguments of the call, or just a problem, as
            `tritile.plan` takes them; or a kernel under `tritile.autotune` or Triton's, followed by its
            arguments. Such a kernel is compiled with the config that the call would run, in this process: not
            while another thread launches kernels. `tritile.check(kernel, ..., device=)` compiles all its
            configs, in processes of their own, and lists which ones spill or do not fit.
        any_rows: compile for any number of rows (M) of a product, with the N and K of this call: each config
            of its class, and configs that are remembered. For a class without a predictor (plain
            float32, say), and other operations, only the kernel of this call. A result of one column is
            computed as one row, and needs a call of its own.
        device: GPU to compile for, as for `tritile.plan`; it need not be installed.

    Raises:
        TritileError: as `tritile.plan` raises it.
        InvalidValueError: tensors are in host memory without `device`, the call is in place, or `any_rows`
            is for a decorated kernel.
        UnsupportedError: the GPU is not NVIDIA's.
        NotCompiledError: a kernel is not in the cache, in mode "strict".
        TuningError: the compiler refuses a kernel; all others are there.
    """
    what = tuner_for(what)
    if isinstance(what, Autotuner):
        if any_rows:
            raise InvalidValueError("warm: any_rows is for operations: call it for each call of a kernel")
        check_keywords(what.fn, what.space or what.configs, kwargs, ("any_rows", "device", "grid"))
    chosen = plan_call("warm", what, args, kwargs, device, ("any_rows", "device"))
    if chosen.device == HOST:
        raise InvalidValueError(
            "warm: tensors are in host memory, where no kernel runs: name a GPU with device="
        )
    if isinstance(what, Autotuner):
        check_nvidia(chosen.device)
        label = f"{chosen.problem.label}, {chosen.config}"
        try:
            with refuse_if_strict(label, "run this in another mode"):
                call = what.call(args, kwargs, chosen.device)
                call.having(stood_in(call.tensors)).compile(chosen.config)
        except TritileError:
            raise
        except Exception as failure:
            raise TuningError(f"warm: {label}: {brief(failure)}") from failure
        return 1
    if chosen.why == IN_PLACE:
        raise InvalidValueError("warm: calls in place are not compiled ahead: leave out= away")
    kernels, reasons = compile_calls(calls_of(chosen.problem, chosen.device, any_rows), chosen.device)
    if reasons:
        error = NotCompiledError if current_mode() == "strict" else TuningError
        raise error(f"warm: {len(kernels)} kernels are there, others are not: {'; '.join(reasons[:3])}")
    return len(kernels)
