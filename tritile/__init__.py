"""Matrix products and permutations as Triton kernels, tuned for any size, dtype and layout.

    import tritile
    c = tritile.matmul(a, b)       # like torch.matmul
    t = tritile.transpose(x)       # like x.mT.contiguous()
    p = tritile.permute(x, dims)   # like x.permute(dims).contiguous()

Products        matmul, mm, bmm, linear, addmm, baddbmm, gated_linear, grouped_matmul, scaled_matmul
Copies          permute, transpose, contiguous
Packed weights  quantize, QuantizedWeight
In models       nn (layers; convert, restore), torch.ops.tritile
Settings        mode, batch_invariant (torch's own products, too)
Planning        plan, Plan, Config, explain, warm, forget, Device, target_device
Measuring       tune, bench, check_invariant, sync (ranks choose alike)
Your kernels    autotune (replaces triton.autotune), Space, check, kernels (tritile's own)
Others' kernels adopt (those under triton.autotune, source unchanged)
Errors          TritileError, the base of every error in errors, which also holds the warnings
"""

import os
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tritile.core.distribution import __version__ as __version__

if TYPE_CHECKING:
    from tritile import errors, nn
    from tritile.choose.pick import Plan
    from tritile.core.config import Config
    from tritile.core.device import Device, target_device
    from tritile.core.forgetting import forget
    from tritile.core.quantized import QuantizedWeight
    from tritile.core.settings import mode
    from tritile.errors import TritileError
    from tritile.invariant.check import check_invariant
    from tritile.invariant.context import batch_invariant
    from tritile.lab.bench import bench
    from tritile.lab.check import check
    from tritile.lab.explain import explain
    from tritile.lab.tune import tune
    from tritile.lab.warm import warm
    from tritile.ops.fused import addmm, baddbmm, gated_linear, linear
    from tritile.ops.grouped import grouped_matmul
    from tritile.ops.matmul import bmm, matmul, mm
    from tritile.ops.permute import contiguous, permute, transpose
    from tritile.ops.plan import plan
    from tritile.ops.quantize import quantize
    from tritile.ops.scaled import scaled_matmul
    from tritile.tune import kernels
    from tritile.tuner.adoption import adopt
    from tritile.tuner.autotuner import autotune
    from tritile.tuner.search import Space
    from tritile.tuner.sync import sync

# Each name's module, imported on first access (PEP 562): `import tritile.tuner` loads the tuner alone, and
# help of the command line neither torch nor Triton.
_NAMES = {
    "tritile.core.config": ("Config",),
    "tritile.core.device": ("Device", "target_device"),
    "tritile.core.forgetting": ("forget",),
    "tritile.core.quantized": ("QuantizedWeight",),
    "tritile.core.settings": ("mode",),
    "tritile.errors": ("TritileError",),
    "tritile.invariant.check": ("check_invariant",),
    "tritile.invariant.context": ("batch_invariant",),
    "tritile.lab.bench": ("bench",),
    "tritile.lab.check": ("check",),
    "tritile.lab.explain": ("explain",),
    "tritile.lab.warm": ("warm",),
    "tritile.ops.fused": ("addmm", "baddbmm", "gated_linear", "linear"),
    "tritile.ops.grouped": ("grouped_matmul",),
    "tritile.ops.matmul": ("bmm", "matmul", "mm"),
    "tritile.ops.permute": ("contiguous", "permute", "transpose"),
    "tritile.ops.plan": ("plan",),
    "tritile.ops.quantize": ("quantize",),
    "tritile.ops.scaled": ("scaled_matmul",),
    "tritile.choose.pick": ("Plan",),
    "tritile.tuner.adoption": ("adopt",),
    "tritile.tuner.autotuner": ("autotune",),
    "tritile.tuner.search": ("Space",),
    "tritile.tuner.sync": ("sync",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {  # the package `tune` is called, and then calls `tritile.lab.tune.tune`
    "errors": "tritile.errors", "kernels": "tritile.tune.kernels", "nn": "tritile.nn", "tune": "tritile.tune",
}  # fmt: skip

__all__ = [
    "Config",
    "Device",
    "Plan",
    "QuantizedWeight",
    "Space",
    "TritileError",
    "addmm",
    "adopt",
    "autotune",
    "baddbmm",
    "batch_invariant",
    "bench",
    "bmm",
    "check",
    "check_invariant",
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
    "sync",
    "target_device",
    "transpose",
    "tune",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return globals().setdefault(name, import_module(_MODULES[name]))
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_MODULE_OF[name]), name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if "torch" in sys.modules:  # whose programs may name operators of torch.ops.tritile and nothing else of this
    import_module("tritile.ops")
_invariant = os.environ.get("TRITILE_BATCH_INVARIANT", "")
if _invariant == "torch":  # of the whole process
    import_module("tritile.invariant.overrides").install_for_process()
elif _invariant not in ("", "0", "1"):  # tritile's own calls raise; those of torch cannot
    warnings.warn(
        f"TRITILE_BATCH_INVARIANT is {_invariant!r}: expected 1, 0 or torch; torch's products stay torch's",
        import_module("tritile.errors").SettingWarning,
        stacklevel=2,
    )
if os.environ.get("TRITILE_ADOPT") or os.environ.get("TRITILE_ADOPT_FILE"):
    # Before anybody imports Triton's autotuner, or at once.
    import_module("tritile.tuner.startup.sitecustomize")
