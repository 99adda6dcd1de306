"""Matrix products and permutations as Triton kernels, tuned for any size, dtype and layout.

    import tritile
    c = tritile.matmul(a, b)       # like torch.matmul
    t = tritile.transpose(x)       # like x.mT.contiguous()
    p = tritile.permute(x, dims)   # like x.permute(dims).contiguous()

Products        matmul, mm, bmm, linear, addmm, baddbmm, gated_linear, grouped_matmul, scaled_matmul
Copies          permute, transpose, contiguous
Packed weights  quantize, QuantizedWeight
In models       nn (layers; convert, restore), torch.ops.tritile
Settings        mode, batch_invariant
Planning        plan, Plan, Config, explain, warm, forget, Device, target_device
Measuring       tune, bench
Your kernels    autotune (replaces triton.autotune), Space, check, kernels (tritile's own)
Errors          TritileError, the base of every error in errors, which also holds the warnings
"""

import os
import sys
from importlib import import_module, reload
from pathlib import Path
from typing import TYPE_CHECKING, Any

# `tritile --help`, the help of a command and a shell's completion use nothing below, and importing torch
# takes seconds. A name that is needed after all is imported by `__getattr__`. While Python looks for what
# `-m` names, argv[0] is "-m".
_argv = getattr(sys, "argv", None) or [""]
_IS_COMMAND = Path(_argv[0]).stem == "tritile" or (_argv[0] == "-m" and "tritile" in sys.orig_argv)
_ONLY_HELP = _IS_COMMAND and (
    not {"-h", "--help"}.isdisjoint(_argv[1:])
    or _argv[1:] in ([], ["--version"])
    or "_TRITILE_COMPLETE" in os.environ
)

if TYPE_CHECKING or not _ONLY_HELP or "_WANTED" in globals():
    from tritile import errors, nn
    from tritile.core.config import Config
    from tritile.core.device import Device, target_device
    from tritile.core.distribution import __version__ as __version__
    from tritile.core.forgetting import forget
    from tritile.core.quantized import QuantizedWeight
    from tritile.core.settings import batch_invariant, mode
    from tritile.errors import TritileError
    from tritile.ops import operators as _operators  # noqa: F401, registers torch.ops.tritile
    from tritile.ops.fused import addmm, baddbmm, gated_linear, linear
    from tritile.ops.grouped import grouped_matmul
    from tritile.ops.matmul import bmm, matmul, mm
    from tritile.ops.permute import contiguous, permute, transpose
    from tritile.ops.plan import plan
    from tritile.ops.quantize import quantize
    from tritile.ops.scaled import scaled_matmul
    from tritile.planning.plans import Plan

if TYPE_CHECKING:
    from tritile.lab.bench import bench
    from tritile.lab.check import check
    from tritile.lab.explain import explain
    from tritile.lab.tune import tune
    from tritile.lab.warm import warm
    from tritile.tune import kernels
    from tritile.tune.autotuner import autotune
    from tritile.tune.search import Space

# Imported on first access (PEP 562): a process that only launches kernels does not load the tuner.
_LAZY = {
    "Space": "tritile.tune.search",
    "autotune": "tritile.tune.autotuner",
    "bench": "tritile.lab.bench",
    "check": "tritile.lab.check",
    "explain": "tritile.lab.explain",
    "kernels": "tritile.tune.kernels",
    "tune": "tritile.tune",
    "warm": "tritile.lab.warm",
}
_MODULES = ("kernels", "tune")  # the package `tune` is callable, and calls `tritile.lab.tune.tune`

__all__ = [
    "Config",
    "Device",
    "Plan",
    "QuantizedWeight",
    "Space",
    "TritileError",
    "addmm",
    "autotune",
    "baddbmm",
    "batch_invariant",
    "bench",
    "bmm",
    "check",
    "contiguous",
    "errors",
    "explain",
    "forget",
    "gated_linear",
    "grouped_matmul",
    "kernels",
    "linear",
    "matmul",
    "mm",
    "mode",
    "nn",
    "permute",
    "plan",
    "quantize",
    "scaled_matmul",
    "target_device",
    "transpose",
    "tune",
    "warm",
]


def __getattr__(name: str) -> Any:
    if _ONLY_HELP and "_WANTED" not in globals() and name in (*__all__, "__version__"):
        globals()["_WANTED"] = True
        return getattr(reload(sys.modules[__name__]), name)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return globals().setdefault(name, module if name in _MODULES else getattr(module, name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
