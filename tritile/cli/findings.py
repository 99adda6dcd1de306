"""What `tritile doctor` checks: what tritile needs, what was found, and what to do about the rest."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
import triton
from packaging.requirements import Requirement

import tritile.ops.matmul as matmul_op
from tritile.choose import gpu_tables
from tritile.choose.classes import MEASURED
from tritile.cli import run
from tritile.cli.shared import counted
from tritile.core import device as devices
from tritile.core import settings
from tritile.core.distribution import __version__
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


# Of the environment: what changes how tritile, Triton or CUDA behave. Passwords in URLs are not shown.
_VARIABLES: Final = re.compile(r"(TRITILE|TRITON|CUDA|NVIDIA|HIP|ROCR)_\w+|CC|LD_LIBRARY_PATH")
_PASSWORD: Final = re.compile(
    r"(?<=://)[^/@\s]+@|(?<=[?&])(\w*(key|token|secret|sig)\w*)=[^&\s]+", re.IGNORECASE
)
_DRIVER: Final = Path("/proc/driver/nvidia/version")


class Machine(NamedTuple):
    """What of NVIDIA's is on this machine, whatever torch makes of it."""

    driver: str  # its version, "" if none is loaded
    has_devices: bool  # /dev/nvidia0 and so on: a container may lack them
    cuda: str  # the version of CUDA that torch was built with, "" for a build without

    @classmethod
    def here(cls) -> "Machine":
        driver = ""
        if _DRIVER.is_file():
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(errors="replace"))
            driver = found[0] if found else "of unknown version"
        return cls(driver, any(Path("/dev").glob("nvidia[0-9]*")), torch.version.cuda or "")


def unseen_gpu(machine: Machine, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return why torch sees no NVIDIA GPU on a machine, and what to do; "" and "" if there is none."""
    has_gpu = bool(machine.driver or machine.has_devices)
    if has_gpu and not machine.cuda:
        return "torch is a build without CUDA", "install a build of torch with CUDA: see its install page"
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if has_gpu and hidden is not None and not re.match(r"\s*(\d|GPU-|MIG-)", hidden):
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU", "unset it, or name a GPU: 0"
    if machine.driver and not machine.has_devices:
        return "no GPU is passed to this container", "start it with a GPU: docker run --gpus all"
    if machine.has_devices:
        advice = "run nvidia-smi: if it fails, install or restart the driver"
        if machine.driver:
            advice = f"driver {machine.driver} may be too old for CUDA {machine.cuda}: run nvidia-smi"
        return "torch finds no working driver", advice
    return "", ""


def _needed_by_torch() -> str:
    """Return what torch requires of Triton, and does not have; "" if it has it, or does not say."""
    try:
        required = [Requirement(text) for text in importlib.metadata.requires("torch") or ()]
    except importlib.metadata.PackageNotFoundError:
        return ""
    for each in required:
        applies = each.marker is None or each.marker.evaluate({"extra": ""})
        fits = each.specifier.contains(triton.__version__, prereleases=True)
        if each.name in ("triton", "pytorch-triton") and applies and not fits:
            return f"torch {torch.__version__} requires triton{each.specifier}: torch.compile may fail"
    return ""


def _versions() -> list[Finding]:
    old = parsed(triton.__version__) < OLDEST_TRITON
    oldest = ".".join(map(str, OLDEST_TRITON))
    advice = f"install triton {oldest} or later" if old else untested("triton", triton.__version__)
    return [
        Finding("tritile", __version__),
        Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Finding("python", platform.python_version(), sys.version_info >= (3, 11)),
        Finding("torch", torch.__version__, True, untested("torch", torch.__version__)),
        Finding("triton", triton.__version__, not old, advice or _needed_by_torch()),
    ]


def _variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return the variables in force."""
    own = sorted(name for name in environ if _VARIABLES.fullmatch(name) and environ[name])
    shown = [
        f"{name}={_PASSWORD.sub(lambda found: f'{found[1]}=***' if found[1] else '***@', environ[name])}"
        for name in own
    ]
    found = [Finding("variables", "\n".join(shown) or "none")]
    for what in settings.unknown_variables(environ):
        found.append(Finding("variables", what, False, "correct its name, or unset it"))
    if environ.get("TRITILE_BATCH_INVARIANT") == "torch":
        advice = "others need `tritile run --batch-invariant COMMAND`"
        found.append(Finding("batch invariance", "of processes that import tritile", True, advice))
    return found


def _settings() -> list[Finding]:
    found = []
    for check in (
        settings.current_mode,
        settings.is_batch_invariant,
        settings.uses_aten,
        lambda: settings.tune_budget_s(1.0),
        settings.spread_bytes,
        lambda: run.environment({}, dict(os.environ)),  # of adoption
        lambda: gpu_tables.pinned(devices.current_gpu() or devices.HOST),
    ):
        try:
            check()
        except TritileError as error:
            found.append(Finding("settings", str(error), False, "set that variable right, or unset it"))
    return list(dict.fromkeys(found))


def _gpu(gpu: devices.Device | None) -> list[Finding]:
    if gpu is None:
        machine = Machine.here()
        why, advice = unseen_gpu(machine, os.environ)
        found = [Finding("driver", machine.driver)] if machine.driver else []
        if why:
            return [Finding("GPU", f"none visible to torch: {why}", False, advice), *found]
        runs = "Triton's interpreter runs kernels" if INTERPRETING else "torch computes calls on the CPU"
        advice = f"{runs}; `tritile compile --target` compiles for another GPU"
        return [Finding("GPU", "none visible to torch", True, advice), *found]
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
    own, shared = settings.store_dir(), settings.shared_url()
    where = f"; on a network file system, so trials are kept in {own}" if own != folder else ""
    where += f", shared through {_PASSWORD.sub('***@', str(shared))}" if shared else ""
    if gpu is None:
        return Finding("cache", f"{folder}, writable{where}")
    store = store_of(gpu)
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
    if place != "cuda" and not INTERPRETING:
        return Finding("a kernel", "none ran: torch computed the product on the CPU")
    what = f"ran {'on the GPU' if place == 'cuda' else 'in the interpreter'}"
    return Finding(
        "a kernel", f"{what}; the largest difference from torch's result is {error:.1e}", error < 1e-3
    )


def findings() -> list[Finding]:
    """Examine this machine."""
    gpu, wrong = devices.current_gpu(), _settings()
    found = [*_versions(), *_gpu(gpu), *([_predictors(gpu)] if gpu and not wrong else [])]
    found += [_cache(gpu), *_variables(os.environ)]
    return [*found, *(wrong or [_kernel()])]  # with a wrong setting, a kernel would only repeat the error
