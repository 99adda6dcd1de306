"""tritile: matrix products and permutations in Triton, at the hardware's speed for any size.

    import tritile
    c = tritile.matmul(a, b)       # as torch.matmul
    t = tritile.transpose(x)       # as x.mT.contiguous()
    p = tritile.permute(x, dims)   # as x.permute(dims).contiguous()

and `tritile.autotune`, which remembers, where `triton.autotune` stood.
"""

from tritile import errors, nn, operators
from tritile.autotuner import autotune
from tritile.config import Config
from tritile.device import Device, target_device
from tritile.errors import TritileError
from tritile.explain import Explanation
from tritile.ops.explain import explain
from tritile.ops.fused import addmm, baddbmm, linear
from tritile.ops.gated import gated_linear
from tritile.ops.grouped import grouped_matmul
from tritile.ops.matmul import bmm, matmul, mm
from tritile.ops.permute import contiguous, permute, transpose
from tritile.ops.plan import plan
from tritile.ops.quantize import quantize
from tritile.ops.run import forget
from tritile.ops.scaled import scaled_matmul
from tritile.ops.sync import sync
from tritile.plans import Plan
from tritile.problem import GroupedProblem, KernelProblem, MatmulProblem, PermuteProblem, QuantizedProblem
from tritile.quantized import QuantizedWeight
from tritile.search import Space
from tritile.settings import batch_invariant, current_mode, mode
from tritile.switch import use_in_torch
from tritile.version import __version__ as __version__

__all__ = [
    "Config",
    "Device",
    "Explanation",
    "GroupedProblem",
    "KernelProblem",
    "MatmulProblem",
    "PermuteProblem",
    "Plan",
    "QuantizedProblem",
    "QuantizedWeight",
    "Space",
    "TritileError",
    "addmm",
    "autotune",
    "baddbmm",
    "batch_invariant",
    "bmm",
    "contiguous",
    "current_mode",
    "errors",
    "explain",
    "forget",
    "gated_linear",
    "grouped_matmul",
    "linear",
    "matmul",
    "mm",
    "mode",
    "nn",
    "operators",
    "permute",
    "plan",
    "quantize",
    "scaled_matmul",
    "sync",
    "target_device",
    "transpose",
    "use_in_torch",
]
