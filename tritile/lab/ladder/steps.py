"""The steps of each ladder, from a naive kernel up to the library's own, as frozen values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from triton import cdiv

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, alignment
from tritile.lab.ladder import matmul as products
from tritile.lab.ladder import transpose as transposes
from tritile.ops.matmul import matmul
from tritile.ops.permute import transpose
from tritile.tune.subject.elements import torch_fp32

Values = Mapping[str, Any] | Config  # a kernel's parameters by name
Grid = tuple[int, ...]
Problem = MatmulProblem | PermuteProblem
Op = Literal["matmul", "transpose"]
Dtype = Literal["float16", "bfloat16", "float32"]
ITEMSIZE: Final = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Kernel:
    """Hold a tutorial kernel and how to launch it on n x n matrices.

    The fastest of several `configs` is found by measuring. `grid(n, config, processors)` returns the grid,
    `asked(n, itemsize, config)` the bytes that all programs read from and write to global memory.
    `blocks(config)` returns the tile of each matrix that a tensor descriptor moves; a kernel without it takes
    pointers. `unfit(device, n)` returns why the kernel cannot run there, or None; the device may be
    `tritile.core.device.INTERPRETER`.
    """

    jitted: Any
    configs: tuple[Config, ...]
    grid: Callable[[int, Values, int], Grid]
    asked: Callable[[int, int, Values], int]
    blocks: Callable[[Values], tuple[tuple[int, int], ...]] | None = None
    unfit: Callable[[Device, int], str | None] = lambda device, n: None


@dataclass(frozen=True)
class Library:
    """Hold a call that a user would make: `call(*matrices)` writes the last of them.

    `problem(n)` returns the problem that tritile plans; a call of torch has none. `checked` is false for a
    call that does something else with as many bytes.
    """

    call: Callable[..., object]
    problem: Callable[[int], Problem] | None = None
    checked: bool = True


@dataclass(frozen=True)
class Step:
    """Hold a step of a ladder: its name, what is new in a few words, and what runs.

    All matrices have `dtype`: a, b and out (op "matmul"), or x and out (op "transpose").
    """

    op: Op
    name: str
    new: str
    dtype: Dtype
    runs: Kernel | Library

    @property
    def yardstick(self) -> bool:
        """Tell whether the step is not ours, and is run for its time alone."""
        return isinstance(self.runs, Library) and self.runs.problem is None

    @property
    def checked(self) -> bool:
        """Tell whether the step computes what its ladder does, so that its answer is checked."""
        return isinstance(self.runs, Kernel) or self.runs.checked

    def unfit(self, device: Device, n: int) -> str | None:
        """Return why the step cannot run on a device, as `Kernel.unfit` does; None if it can."""
        return self.runs.unfit(device, n) if isinstance(self.runs, Kernel) else None


def _by_element(n: int, config: Values, processors: int) -> Grid:
    return (cdiv(n * n, config["BLOCK"]),)


def _by_tile(n: int, config: Values, processors: int) -> Grid:
    return (cdiv(n, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)


def _by_two_axes(n: int, config: Values, processors: int) -> Grid:
    return cdiv(n, config["BLOCK_M"]), cdiv(n, config["BLOCK_N"])


def _asked_by_tiles(n: int, itemsize: int, config: Values) -> int:
    """Count all of a for each column of tiles, all of b for each row of tiles, and out once."""
    times = cdiv(n, config["BLOCK_N"]) + cdiv(n, config["BLOCK_M"]) + 1
    return times * n * n * itemsize


def _asked_once(n: int, itemsize: int, config: Values) -> int:
    return 2 * n * n * itemsize


def _moved_by_tma(config: Values) -> tuple[tuple[int, int], ...]:
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    return (m, k), (k, n), (m, n)


def _without_tma(device: Device, n: int) -> str | None:
    if n % 8:
        return f"TMA wants rows that start on 16 bytes: n a multiple of 8, and it is {n}"
    if device != devices.INTERPRETER and device.nvidia < 90:
        return "TMA is in NVIDIA GPUs from Hopper (sm_90) on"
    return None


def _without_gluon(device: Device, n: int) -> str | None:
    if device == devices.INTERPRETER:
        return "written in Gluon, which has no interpreter"
    return "laid out for warps of 32 threads" if device.warp_size != 32 else None


def _too_many_threads(device: Device, n: int) -> str | None:
    return "32 warps of 64 threads are more than a program can have" if device.warp_size > 32 else None


def _tiles(m: int, n: int, k: int, warps: int, stages: int = 3, group: int = 1) -> Config:
    return Config.of(warps, stages, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


def _product(*configs: Config) -> Kernel:
    return Kernel(products.matmul_tiles, configs, _by_tile, _asked_by_tiles)


def _shared(swizzle: bool) -> Kernel:
    side = transposes.TILE.value
    return Kernel(
        transposes.transpose_shared, (Config.of(4, 1, SWIZZLE=swizzle),),
        lambda n, config, processors: (cdiv(n, side), cdiv(n, side)), _asked_once, unfit=_without_gluon,
    )  # fmt: skip


def _square_product(n: int) -> MatmulProblem:
    rows = alignment(n * ITEMSIZE["bfloat16"]) if n > 1 else 16  # a stride over one row is never used
    return MatmulProblem(1, n, n, n, "bfloat16", "bfloat16", a_align=rows, b_align=rows, out_align=rows)


def _torch_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply with torch, fp32 matrices in fp32 and not in TF32."""
    with torch_fp32():
        torch.matmul(a, b, out=out)


_FIXED = (128, 128, 32, 8)  # fits every GPU
_SHAPES = ((128, 128, 8), (128, 256, 8), (256, 128, 8), (64, 256, 8), (64, 128, 4))
_TURNS = ((32, 32, 4), (64, 64, 4), (64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 128, 4), (128, 32, 4))

MATMUL: Final = (
    Step(
        "matmul", "naive", "each thread fetches a row and a column of its own", "float32",
        Kernel(
            products.matmul_naive, (Config.of(8, 1, BLOCK=256),), _by_element,
            lambda n, itemsize, config: (2 * n * n * n + n * n) * itemsize,
        ),
    ),
    Step(
        "matmul", "shared tiles", "1,024 threads share what they fetch, a sum each", "float32",
        replace(_product(_tiles(32, 32, 32, 32)), unfit=_too_many_threads),
    ),
    Step(
        "matmul", "register blocks", "64 sums a thread: shared memory is read less often", "float32",
        _product(_tiles(128, 128, 16, 8)),
    ),
    Step("matmul", "torch, fp32", "torch.matmul, without TF32", "float32", Library(_torch_matmul)),
    Step(
        "matmul", "tensor cores", "16-bit operands, multiplied tile by tile", "bfloat16",
        _product(_tiles(*_FIXED)),
    ),
    Step(
        "matmul", "autotuned", "tile, stages and order by tritile.autotune", "bfloat16",
        _product(
            _tiles(*_FIXED, group=8),
            *(_tiles(m, n, 64, warps, stages, 8) for m, n, warps in _SHAPES for stages in (3, 4)),
        ),
    ),
    Step(
        "matmul", "persistent, TMA", "the copy engine fetches; programs go on from tile to tile", "bfloat16",
        Kernel(
            products.matmul_persistent, (_tiles(128, 256, 64, 8, 3, 8),),
            lambda n, config, processors: (min(processors, *_by_tile(n, config, processors)),),
            _asked_by_tiles, _moved_by_tma, _without_tma,
        ),
    ),
    Step("matmul", "tritile.matmul", "the library's kernels and its choice", "bfloat16",
         Library(lambda a, b, out: matmul(a, b, out=out), _square_product)),
    Step("matmul", "torch, bf16", "torch.matmul", "bfloat16", Library(_torch_matmul)),
)  # fmt: skip

TRANSPOSE: Final = (
    Step(
        "transpose", "row by row", "a program reads a row and writes a column", "float32",
        Kernel(transposes.transpose_rows, (Config.of(1, 1, BLOCK=32),), lambda n, *_: (n,), _asked_once),
    ),
    Step(
        "transpose", "element by element", "a thread an element: far more of them under way", "float32",
        Kernel(transposes.transpose_elements, (Config.of(4, 1, BLOCK=128),), _by_element, _asked_once),
    ),
    Step(
        "transpose", "shared tiles", "turned in shared memory: writes fill whole sectors", "float32",
        _shared(False),
    ),
    Step(
        "transpose", "no bank conflicts", "swizzled: a column of the tile is in 32 banks, not one", "float32",
        _shared(True),
    ),
    Step(
        "transpose", "autotuned", "tile shapes, square or not, by tritile.autotune", "float32",
        Kernel(
            transposes.transpose_tiles,
            tuple(Config.of(warps, 1, BLOCK_M=m, BLOCK_N=n) for m, n, warps in _TURNS),
            _by_two_axes, _asked_once,
        ),
    ),
    Step("transpose", "tritile.transpose", "the library's kernels and its choice", "float32",
         Library(lambda x, out: transpose(x, out=out), lambda n: PermuteProblem.turned(1, n, n, 4))),
    Step("transpose", "torch", "x.t().contiguous()", "float32", Library(lambda x, out: out.copy_(x.t()))),
    Step("transpose", "device copy", "out.copy_(x), which turns nothing: the limit", "float32",
         Library(lambda x, out: out.copy_(x), checked=False)),
)  # fmt: skip

LADDERS: Final = {"matmul": MATMUL, "transpose": TRANSPOSE}
