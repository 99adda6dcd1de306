"""Describe what tuning the kernels of `author_kernels.py` takes, for any autotuner.

`SUBJECTS` has for each kernel what a tuner asks for: configs and a wider space to choose from, a key, a
grid, inputs of a shape, and the answer in plain torch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from author_kernels import attention, layer_norm, softmax


def random(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Return normal numbers, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def softmax_inputs(shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> dict[str, Any]:
    """Return arguments by name for x of `shape` (rows, columns)."""
    x = random(shape, dtype, device, 0)
    out = torch.full_like(x, float("nan"))
    return {"x_ptr": x, "out_ptr": out, "rows": shape[0], "columns": shape[1],
            "stride_x": x.stride(0), "stride_out": out.stride(0)}  # fmt: skip


def softmax_reference(x_ptr: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
    """Return what the kernel should write, by argument."""
    return {"out_ptr": torch.softmax(x_ptr, -1)}


def layer_norm_inputs(shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> dict[str, Any]:
    """Return arguments by name for x of `shape` (rows, columns), whose mean is not 0."""
    rows, columns = shape
    x = random(shape, dtype, device, 0) + 3
    mean = torch.full((rows,), float("nan"), device=device)
    pointers = {"x_ptr": x, "weight_ptr": random((columns,), dtype, device, 1),
                "bias_ptr": random((columns,), dtype, device, 2), "out_ptr": torch.full_like(x, float("nan")),
                "mean_ptr": mean, "rstd_ptr": mean.clone()}  # fmt: skip
    return pointers | {"rows": rows, "columns": columns,
                       "stride_x": x.stride(0), "stride_out": x.stride(0), "eps": 1e-5}  # fmt: skip


def layer_norm_reference(
    x_ptr: torch.Tensor, weight_ptr: torch.Tensor, bias_ptr: torch.Tensor, eps: float, **_: Any
) -> dict[str, torch.Tensor]:
    """Return what the kernel should write, by argument."""
    out = torch.nn.functional.layer_norm(x_ptr, x_ptr.shape[-1:], weight_ptr, bias_ptr, eps)
    variance, mean = torch.var_mean(x_ptr.float(), -1, correction=0)
    return {"out_ptr": out, "mean_ptr": mean, "rstd_ptr": torch.rsqrt(variance + eps)}


def attention_inputs(shape: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> dict[str, Any]:
    """Return arguments by name for `shape` (batch, heads, sequence, 64 or 128, 1 if causal)."""
    *sizes, causal = shape
    q, k, v = (random(sizes, dtype, device, seed) for seed in range(3))
    out = torch.full_like(q, float("nan"))
    pointers = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out}
    strides = {f"stride_{name[0]}{axis}": tensor.stride(i)
               for name, tensor in pointers.items() for i, axis in enumerate("bhs")}  # fmt: skip
    sizes = {"heads": sizes[1], "sequence": sizes[2], "scale": sizes[3] ** -0.5}
    return pointers | sizes | strides | {"HEAD": q.shape[3], "CAUSAL": bool(causal)}


def attention_reference(
    q_ptr: torch.Tensor, k_ptr: torch.Tensor, v_ptr: torch.Tensor, scale: float, CAUSAL: bool, **_: Any
) -> dict[str, torch.Tensor]:
    """Return what the kernel should write, by argument."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return {"out_ptr": attend(q_ptr, k_ptr, v_ptr, is_causal=CAUSAL, scale=scale)}


_OPTIONS = ("num_warps", "num_stages")
Values = Mapping[str, int]  # of a config's parameters, by name


def configs_of(
    parameters: Mapping[str, Sequence[int]], where: Callable[[Values], bool] = lambda _: True
) -> list[triton.Config]:
    """Return every combination of the parameters that `where` accepts."""
    found = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
    return [
        triton.Config(
            {name: value for name, value in values.items() if name not in _OPTIONS},
            **{name: value for name, value in values.items() if name in _OPTIONS},
        )
        for values in found
        if where(values)
    ]


def row_tile_fits(values: Values) -> bool:
    """Tell whether a thread has at least 4 elements of a tile, one vector, and at most 64, for registers."""
    return 4 <= values["ROWS"] * values["BLOCK"] // (32 * values["num_warps"]) <= 64


def attention_tile_fits(values: Values) -> bool:
    """Tell whether warps have 16 rows, sums and scores about fit registers, and stages fit shared memory.

    HEAD is taken as 128, the larger.
    """
    m, n, warps = values["BLOCK_M"], values["BLOCK_N"], values["num_warps"]
    return 16 * warps <= m <= 6144 * warps // (128 + n) and n * values["num_stages"] <= 384


@dataclass(frozen=True)
class Subject:
    """Hold a kernel and what tuning it takes.

    `parameters` and `where` span the space; `configs` are those of it that an author would list.
    `inputs(shape, dtype, device)` returns arguments by name, outputs full of NaN; `reference(**arguments)`
    returns the right outputs, and `grid(**arguments)` the grid as a function of the config's parameters.
    """

    kernel: Any
    configs: list[triton.Config]
    parameters: Mapping[str, Sequence[int]]
    where: Callable[[Values], bool]
    key: list[str]
    grid: Callable[..., Callable[[Mapping[str, Any]], tuple[int, ...]]]
    inputs: Callable[..., dict[str, Any]]
    reference: Callable[..., dict[str, torch.Tensor]]


def row_grid(rows: int, **_: Any) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return a grid with a program for every ROWS rows."""
    return lambda meta: (triton.cdiv(rows, meta["ROWS"]),)


def attention_grid(q_ptr: torch.Tensor, **_: Any) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return a grid with a program for every BLOCK_M queries of each head of each batch."""
    batch, heads, sequence, _ = q_ptr.shape
    return lambda meta: (triton.cdiv(sequence, meta["BLOCK_M"]) * batch * heads,)


_ROW_BLOCKS = (1024, 2048, 4096, 8192, 16384, 32768)
ROW_CONFIGS = [
    *configs_of({"ROWS": (1,), "BLOCK": _ROW_BLOCKS, "num_warps": (4, 8, 16, 32)}, row_tile_fits),
    *configs_of({"ROWS": (2, 4), "BLOCK": (1024, 2048), "num_warps": (4, 8)}, row_tile_fits),
]
ROW_SPACE = {"ROWS": (1, 2, 4, 8), "BLOCK": (256, 512, *_ROW_BLOCKS), "num_warps": (1, 2, 4, 8, 16, 32)}
ATTENTION_CONFIGS = configs_of(
    {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    attention_tile_fits,
)
ATTENTION_SPACE = {
    "BLOCK_M": (32, 64, 128, 256),
    "BLOCK_N": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
}

SUBJECTS = {
    "softmax": Subject(
        softmax, ROW_CONFIGS, ROW_SPACE, row_tile_fits, ["rows", "columns"],
        row_grid, softmax_inputs, softmax_reference,
    ),
    "layer_norm": Subject(
        layer_norm, ROW_CONFIGS, ROW_SPACE, row_tile_fits, ["rows", "columns"],
        row_grid, layer_norm_inputs, layer_norm_reference,
    ),
    "attention": Subject(
        attention, ATTENTION_CONFIGS, ATTENTION_SPACE, attention_tile_fits,
        ["heads", "sequence", "HEAD", "CAUSAL"], attention_grid, attention_inputs, attention_reference,
    ),
}  # fmt: skip
