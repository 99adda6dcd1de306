"""The rungs of each ladder, from a naive kernel up to the library's own, and how each is launched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

import ladder_matmul as products
import ladder_transpose as transposes
from tritile.choose import pick
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.fields import alignment
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.core.settings import mode
from tritile.families import launching
from tritile.lab.traffic import SECTOR
from tritile.ops.matmul import matmul
from tritile.ops.permute import transpose
from tritile.runtime.ahead import Resources, check_fits, compiling_for, resources
from tritile.runtime.compiles import OPTIONS
from tritile.runtime.launch import Pointer
from tritile.tune.subject.answers import torch_fp32

Values = Mapping[str, Any] | Config  # a kernel's parameters by name
Op = Literal["matmul", "transpose"]
Dtype = Literal["float16", "bfloat16", "float32"]
ITEMSIZE: Final = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Rung:
    """A step on n x n row-major matrices of `dtype`: a, b and out of a product, x and out of a transpose.

    A tutorial kernel has `configs`, of which the fastest is found by measuring, and
    - `grid(n, config, processors)`;
    - `requested(n, itemsize, config)`: the bytes that all programs request from global memory; of a transpose
      those of whole sectors, for n of 128 or more;
    - `blocks(config)`: the tile of each matrix that a tensor descriptor moves; None for pointers;
    - `unfit(device, n)`: why the kernel cannot run there, None if it can.

    Any other rung is a `call` of the matrices, which writes the last. `problem(n)` is what tritile plans for
    its own call; torch's calls have none. `checked` is False for a call that only moves as many bytes.
    """

    op: Op
    name: str
    idea: str
    dtype: Dtype
    kernel: Any = None
    configs: tuple[Config, ...] = ()
    grid: Callable[[int, Values, int], tuple[int, ...]] = lambda n, config, processors: (n,)
    requested: Callable[[int, int, Values], int] = lambda n, itemsize, config: 0
    blocks: Callable[[Values], tuple[tuple[int, int], ...]] | None = None
    unfit: Callable[[Device, int], str | None] = lambda device, n: None
    call: Callable[..., object] | None = None
    problem: Callable[[int], MatmulProblem | PermuteProblem] | None = None
    checked: bool = True

    @property
    def is_baseline(self) -> bool:
        """True for torch's calls, which have nothing but a time."""
        return self.kernel is None and self.problem is None

    def config(self, n: int, device: Device) -> Config | None:
        """Return the first config, or the library's choice; None for torch's calls."""
        if self.problem is None:
            return self.configs[0] if self.configs else None
        plan = pick.plan_for(self.problem(n), device, "cached")
        return plan.config if plan else None

    def arguments(self, matrices: Sequence[Any], n: int, config: Values) -> tuple[Any, ...]:
        """Return the kernel's arguments besides its config: matrices, or descriptors of them, and n."""
        if self.blocks is None:
            return (*matrices, n)
        tiles = zip(matrices, self.blocks(config), strict=True)
        return (*(TensorDescriptor(matrix, [n, n], [n, 1], list(block)) for matrix, block in tiles), n)

    def run(self, matrices: Sequence[torch.Tensor], config: Config | None, processors: int) -> None:
        """Launch on the current GPU, a tutorial kernel with this config."""
        if self.call is not None:
            with mode("cached"):  # whose config the result shows
                self.call(*matrices)
            return
        assert config is not None
        n, options = matrices[0].shape[0], {**OPTIONS, **config.to_triton().all_kwargs()}
        self.kernel[self.grid(n, config, processors)](*self.arguments(matrices, n, config), **options)

    def resources(self, n: int, config: Config, device: Device) -> Resources:
        """Compile for a device, which need not be here. Raises TuningError where it does not fit."""
        if self.problem is not None:
            return resources(launching.compiled_for(self.problem(n), config, device))
        pointers = [Pointer(0, getattr(torch, self.dtype))] * (3 if self.op == "matmul" else 2)
        with compiling_for(device):
            args = self.arguments(pointers, n, config)
            compiled = self.kernel.warmup(*args, grid=(1,), **OPTIONS, **config.to_triton().all_kwargs())
        check_fits(compiled, device)
        return resources(compiled)


def _by_element(n: int, config: Values, processors: int) -> tuple[int, ...]:
    return (cdiv(n * n, config["BLOCK"]),)


def _by_tile(n: int, config: Values, processors: int) -> tuple[int, ...]:
    return (cdiv(n, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)


def _by_tiles(n: int, itemsize: int, config: Values) -> int:
    """All of a for each column of tiles, all of b for each row of tiles, and out once."""
    return (cdiv(n, config["BLOCK_N"]) + cdiv(n, config["BLOCK_M"]) + 1) * n * n * itemsize


def _sectors(n: int, itemsize: int, run: int) -> int:
    """Bytes of the sectors of runs of so many elements, which begin anew in each of n rows."""
    found, period = 0, SECTOR // itemsize  # rows after which runs begin at the same place in a sector
    for row in range(min(n, period)):
        for start in range(row * n, row * n + n, run):
            end = min(start + run, row * n + n)
            touched = (end * itemsize - 1) // SECTOR - start * itemsize // SECTOR + 1
            found += touched * len(range(row, n, period))
    return found * SECTOR


def _without_tma(device: Device, n: int) -> str | None:
    if n % 8:
        return f"TMA wants rows that start on 16 bytes: n a multiple of 8, and it is {n}"
    return None if device.nvidia >= 90 else "TMA is in NVIDIA GPUs from Hopper (sm_90) on"


def _warps_of_32(device: Device, n: int) -> str | None:
    return "written for warps of 32 threads" if device.warp_size != 32 else None


def _square_product(n: int) -> MatmulProblem:
    rows = alignment(n * ITEMSIZE["bfloat16"]) if n > 1 else 16  # a stride over one row is never used
    return MatmulProblem(1, n, n, n, "bfloat16", "bfloat16", a_align=rows, b_align=rows, out_align=rows)


def _torch_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    with torch_fp32():  # not in TF32
        torch.matmul(a, b, out=out)


def _tiles(m: int, n: int, k: int, warps: int, stages: int = 3, group: int = 1) -> Config:
    return Config.of(warps, stages, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


_TILED: Final[dict[str, Any]] = {"grid": _by_tile, "requested": _by_tiles}
_LARGE: Final = (
    _tiles(128, 128, 32, 8, group=8),  # fits every GPU
    *(_tiles(m, n, 64, warps, stages, 8) for stages in (3, 4) for m, n, warps in
      ((128, 128, 8), (128, 256, 8), (256, 128, 8), (64, 256, 8), (64, 128, 4))),
)  # fmt: skip
_SHAPES: Final = ((32, 32, 4), (64, 64, 4), (64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 128, 4), (128, 32, 4))
_SHARED: Final[dict[str, Any]] = {
    "grid": lambda n, config, processors: (cdiv(n, transposes.TILE.value),) * 2,
    "requested": lambda n, itemsize, config: 2 * _sectors(n, itemsize, transposes.TILE.value),
    "unfit": _warps_of_32,
}

MATMUL: Final = (
    Rung("matmul", "naive", "each thread fetches a row and a column of its own", "float32",
         products.matmul_naive, (Config.of(8, 1, BLOCK=256),), _by_element,
         lambda n, itemsize, config: (2 * n * n * n + n * n) * itemsize),
    Rung("matmul", "shared tiles", "1,024 threads share what they fetch, a sum each", "float32",
         products.matmul_tiles, (_tiles(32, 32, 32, 32),), **_TILED, unfit=_warps_of_32),
    Rung("matmul", "register blocks", "64 sums a thread: shared memory is read less often", "float32",
         products.matmul_tiles, (_tiles(128, 128, 16, 8),), **_TILED),
    Rung("matmul", "torch, fp32", "torch.matmul, without TF32", "float32", call=_torch_matmul),
    Rung("matmul", "tensor cores", "16-bit operands, multiplied tile by tile", "bfloat16",
         products.matmul_tiles, (_tiles(128, 128, 32, 8),), **_TILED),
    Rung("matmul", "autotuned", "tile, stages and order by tritile.autotune", "bfloat16",
         products.matmul_tiles, _LARGE, **_TILED),
    Rung("matmul", "persistent, TMA", "the copy engine fetches; programs go on from tile to tile", "bfloat16",
         products.matmul_persistent, (_tiles(128, 256, 64, 8, 3, 8),),
         lambda n, config, processors: (min(processors, *_by_tile(n, config, processors)),), _by_tiles,
         lambda c: ((c["BLOCK_M"], c["BLOCK_K"]), (c["BLOCK_K"], c["BLOCK_N"]), (c["BLOCK_M"], c["BLOCK_N"])),
         _without_tma),
    Rung("matmul", "tritile.matmul", "the library's kernels and its choice", "bfloat16",
         call=lambda a, b, out: matmul(a, b, out=out), problem=_square_product),
    Rung("matmul", "torch, bf16", "torch.matmul", "bfloat16", call=_torch_matmul),
)  # fmt: skip

TRANSPOSE: Final = (
    Rung("transpose", "row by row", "a program reads a row and writes a column", "float32",
         transposes.transpose_rows, (Config.of(1, 1, BLOCK=32),),
         requested=lambda n, itemsize, config: _sectors(n, itemsize, n) + n * n * SECTOR),
    Rung("transpose", "element by element", "a thread an element: far more of them under way", "float32",
         transposes.transpose_elements, (Config.of(4, 1, BLOCK=128),), _by_element,
         lambda n, itemsize, config: cdiv(n * n * itemsize, SECTOR) * SECTOR + n * n * SECTOR),
    Rung("transpose", "shared tiles", "transposed in shared memory: writes fill whole sectors", "float32",
         transposes.transpose_shared, (Config.of(4, 1, SWIZZLE=False),), **_SHARED),
    Rung("transpose", "no bank conflicts", "swizzled: a column of the tile is in 32 banks, not one",
         "float32", transposes.transpose_shared, (Config.of(4, 1, SWIZZLE=True),), **_SHARED),
    Rung("transpose", "autotuned", "tile shapes, square or not, by tritile.autotune", "float32",
         transposes.transpose_tiles,
         tuple(Config.of(warps, 1, BLOCK_M=m, BLOCK_N=n) for m, n, warps in _SHAPES),
         lambda n, config, processors: (cdiv(n, config["BLOCK_M"]), cdiv(n, config["BLOCK_N"])),
         lambda n, size, c: _sectors(n, size, c["BLOCK_N"]) + _sectors(n, size, c["BLOCK_M"])),
    Rung("transpose", "tritile.transpose", "the library's kernels and its choice", "float32",
         call=lambda x, out: transpose(x, out=out), problem=lambda n: PermuteProblem.transposed(1, n, n, 4)),
    Rung("transpose", "torch", "x.t().contiguous()", "float32", call=lambda x, out: out.copy_(x.t())),
    Rung("transpose", "device copy", "out.copy_(x), which only copies: the limit", "float32",
         call=lambda x, out: out.copy_(x), checked=False),
)  # fmt: skip

LADDERS: Final = {"matmul": MATMUL, "transpose": TRANSPOSE}
