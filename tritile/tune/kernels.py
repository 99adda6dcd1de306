"""tritile's product kernel under `tritile.autotune`, to be launched like any Triton kernel.

    tritile.kernels.matmul_tile[lambda meta: (...)](a_ptr=a, ..., PRECISION="ieee")

In mode "tune", the default, a call measures the configs that are legal and predicted to be fastest, out of
thousands in the family's space, stores the times and runs the winner. `tritile.matmul` does not launch
through this kernel: its calls are planned.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import triton

from tritile.choose import waves
from tritile.core import device as devices
from tritile.core.call import MatmulCall, Memory, View
from tritile.core.problem import MatmulProblem
from tritile.families.matmul_tile.family import FAMILY
from tritile.tuner.autotuner import Autotuner, autotune

_KEY: Final = (
    "M", "N", "K", "batch", "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_om", "PRECISION"
)  # fmt: skip
_MEASURED: Final = 48  # configs to measure for a call, the likeliest first
_STAND_IN: Final = "nvidia-h200"  # the GPU for which configs are ranked if tensors are in host memory


def problem_of(named: Mapping[str, Any]) -> MatmulProblem:
    """Return the product that arguments of `matmul_tile` describe, without its epilogue."""
    batch = tuple(named["batch_shape"]) if prod(named["batch_shape"]) > 1 else ()

    def view(name: str, rows: str, columns: str) -> View:
        tensor, side = named[f"{name}_ptr"], name[0]
        strides = named[f"stride_{side}{rows.lower()}"], named[f"stride_{side}{columns.lower()}"]
        steps = tuple(named[f"{name}_batch_strides"]) if batch else ()
        return Memory.of(name, tensor).view((named[rows], named[columns]), strides, steps)

    a, b, out = view("a", "M", "K"), view("b", "K", "N"), view("out", "M", "N")
    return MatmulCall(a, b, out, batch, named["PRECISION"]).problem


def likeliest(
    configs: Sequence[triton.Config], named_args: Mapping[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Return the configs that are legal for a call and predicted to be fastest, the fastest first."""
    named = {**named_args, **kwargs}
    a = named["a_ptr"]
    device = devices.gpu(a.get_device()) if a.is_cuda else devices.target_device(_STAND_IN)
    by_text = {str(config): config for config in configs}
    ranked = waves.ranked(problem_of(named), device, FAMILY.name)
    return [by_text[text] for config in ranked if (text := str(config.to_triton())) in by_text][:_MEASURED]


def tuned(**options: Any) -> Autotuner:
    """Return `matmul_tile` under `tritile.autotune` with these options; heuristics set MASK_M, N and K."""
    masks = {
        f"MASK_{side}": lambda args, side=side: args[side] % args[f"BLOCK_{side}"] != 0 for side in "MNK"
    }
    kernel = triton.heuristics(masks)(FAMILY.kernel.jitted)
    configs = [config.to_triton() for config in FAMILY.configs]
    return autotune(configs, list(_KEY), {"early_config_prune": likeliest}, **options)(kernel)


def __getattr__(name: str) -> Autotuner:
    if name != "matmul_tile":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, tuned())


def __dir__() -> list[str]:
    return ["matmul_tile"]
