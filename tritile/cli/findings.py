"""What `tritile doctor` checks: what tritile needs, what was found, and what to do about the rest."""

import os
import platform
import shutil
import sys
import tempfile
import warnings
from typing import NamedTuple

import torch
import triton

import tritile.ops.matmul as matmul_op
from tritile.choose import gpu_tables
from tritile.choose.classes import MEASURED
from tritile.cli.shared import counted
from tritile.core import device as devices
from tritile.core import settings
from tritile.core.triton_private import INTERPRETING
from tritile.core.versions import OLDEST_TRITON, parsed, untested
from tritile.errors import TritileError, brief
from tritile.lab.environment import environment
from tritile.tuner.store.trials import store_of


class Finding(NamedTuple):
    """The state of one thing; `advice` is "" if there is nothing to do."""

    name: str
    found: str
    good: bool = True
    advice: str = ""


def _versions() -> list[Finding]:
    old = parsed(triton.__version__) < OLDEST_TRITON
    oldest = ".".join(map(str, OLDEST_TRITON))
    advice = f"install triton {oldest} or later" if old else untested("triton", triton.__version__)
    return [
        Finding("python", platform.python_version(), sys.version_info >= (3, 11)),
        Finding("torch", torch.__version__, True, untested("torch", torch.__version__)),
        Finding("triton", triton.__version__, not old, advice),
    ]


def _settings() -> list[Finding]:
    found = []
    for check in (
        settings.current_mode,
        settings.is_batch_invariant,
        settings.uses_aten,
        lambda: settings.tune_budget_s(1.0),
        lambda: gpu_tables.pinned(devices.current_gpu() or devices.HOST),
    ):
        try:
            check()
        except TritileError as error:
            found.append(Finding("settings", str(error), False, "set that variable right, or unset it"))
    return found


def _gpu(gpu: devices.Device | None) -> list[Finding]:
    if gpu is None:
        runs = "Triton's interpreter runs kernels" if INTERPRETING else "torch computes calls on the CPU"
        advice = f"{runs}; `tritile compile --target` compiles for another GPU"
        return [Finding("GPU", "none visible to torch", True, advice)]
    facts = f"{gpu.name}, {gpu.arch}, {gpu.processors} SMs, {gpu.memory_gbps:.0f} GB/s"
    facts += f", {gpu.shared_memory / 1024:.0f} KiB shared memory"
    table, advice = "none", "tritile tune --suite llm, for example, measures here"
    for shipped in [each for each in gpu_tables.shipped(gpu) if each.entries][:1]:
        table = (
            f"{len(shipped.entries)} entries, measured with triton {shipped.triton or 'of unknown version'}"
        )
        other = f"triton {gpu.triton} is in use: the table still counts, but times may differ"
        advice = other if shipped.triton not in ("", gpu.triton) else ""
    return [
        Finding("GPU", facts),
        Finding("driver", environment(gpu)["driver"] or "unknown"),
        Finding("assembler", gpu.compiler or "unknown"),
        Finding("shipped table", table, True, advice),
    ]


def _predictors(gpu: devices.Device) -> Finding:
    names: dict[str, list[str]] = {}
    for name in MEASURED:
        found = gpu_tables.predictor(name, gpu)
        where = "none" if found is None else found[1]
        if found is not None and not found[0].is_current_class(name):
            where += ", with other kernels"
        names.setdefault(where, []).append(name)
    text = "; ".join(f"{where}: {', '.join(own)}" for where, own in names.items())
    advice = "" if gpu_tables.is_calibrated(gpu) else "tritile tune --calibrate all (minutes a class)"
    return Finding("predictors", text, True, advice)


def _cache(gpu: devices.Device | None) -> Finding:
    folder = settings.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = "set TRITILE_CACHE_DIR to a writable folder"
        return Finding("cache", f"{folder}: {brief(error)}", False, advice)
    if gpu is None:
        return Finding("cache", f"{folder}, writable")
    store = store_of(gpu)
    where = f" in {store.path.parent}" if settings.store_dir() != folder else ""
    where += f", shared through {settings.shared_url()}" if settings.shared_url() else ""
    count = sum(1 for _ in store.all_trials())
    return Finding("cache", f"{folder}: {counted(count, 'trial')} of {gpu.name}{where}")


def _kernel() -> Finding:
    place = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(33, 65, device=place, dtype=torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = float((matmul_op.matmul(a, a.mT, precision="ieee") - a @ a.mT).abs().max())
    except TritileError as failure:  # its message says what to do
        return Finding("a kernel", brief(failure), False)
    except Exception as failure:  # whatever stops a kernel is the finding
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        advice = "see the message; the GPU's driver, Triton and torch have to fit each other"
        if compiler is None or shutil.which(compiler) is None:
            advice = "install a C compiler, or name one in CC: Triton builds its launcher with it"
        return Finding("a kernel", brief(failure), False, advice)
    what = "none ran: torch computed the product on the CPU"
    if place == "cuda" or INTERPRETING:
        what = f"ran {'on the GPU' if place == 'cuda' else 'in the interpreter'}"
    return Finding(
        "a kernel", f"{what}; the largest difference from torch's result is {error:.1e}", error < 1e-3
    )


def findings() -> list[Finding]:
    """Examine this machine."""
    gpu, wrong = devices.current_gpu(), _settings()
    found = [*_versions(), *_gpu(gpu), *([_predictors(gpu)] if gpu and not wrong else [])]
    # With a wrong setting, a kernel would only repeat the error.
    return [*found, _cache(gpu), *(wrong or [_kernel()])]
