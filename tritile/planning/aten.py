"""Predict how long torch's own kernel takes: the time of the candidate `aten`.

A small network of rectified linear units, fitted to torch's times at the sizes of a class's sweep, predicts
the logarithm of measured time over a floor. Its inputs are how well common tile shapes fit the problem, and
its sizes and alignments: which kernel cuBLAS picks is unknown, but it picks one whose tiles fit.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import metadata
from typing import Any, Final

import numpy as np
import torch

from tritile.core.config import ATEN, Config
from tritile.core.device import Device
from tritile.core.epilogue import BARE, Epilogue
from tritile.core.problem import (
    AS_TORCH,
    FP8_DTYPES,
    ITEMSIZE,
    GroupedProblem,
    MatmulProblem,
    Product,
    QuantizedProblem,
    Tiled,
)
from tritile.errors import InvalidValueError
from tritile.families.common.cost import leading_strides
from tritile.planning.classes import MEASURED, OPERATIONS, SIDES
from tritile.tuner.store.files import numbers_from, rows_from

CONFIG: Final = Config((), 1, 1, family=ATEN)
LAYERS: Final = 32, 16  # units
_UNPACK_US: Final = 0.835  # of the launch that unpacks a weight
_UNPACKED_SHARE: Final = 0.811  # of the peak bandwidth, that it reaches
OTHER: Final = 1.05  # ours has to be predicted so much slower if torch, cuBLAS or the GPU differs

# Tile shapes of cuBLAS's kernels on Hopper.
_TILES: Final = np.array(
    [(128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64), (128, 192), (192, 128), (64, 256),
     (256, 64)]
).T  # fmt: skip
_SIDES: Final = np.array([64, 128, 192, 256])[:, None]  # of a tile whose other side is any multiple of 8
_STEPS: Final = np.arange(16, 257, 8)
_EDGE: Final = 24  # a tile of so many columns takes twice as long for each as one of very many
_AREAS: Final = _SIDES * _STEPS
_SLOWER: Final = 1 + _EDGE / _STEPS
_FULL_WAVES: Final = 20  # beyond so many, the last one hardly counts
# Only the scale of these matters: the network learns the rest.
_PRODUCTS_PER_US: Final = 8e8  # of one byte
_BYTES_PER_US: Final = 3e6
_START_US: Final = 2.5
_DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
_PRECISIONS: Final = ("ieee", "tf32")
_LARGEST: Final = 1e6  # number of a network
_IN_ONE: Final = BARE, Epilogue(bias="row")  # of one launch; the first one of batches too
_LONG: Final = 512, 1e9  # K and operations from which a product takes several times as long as its epilogue
_LEAST_FP8: Final = 89  # compute capability of torch's products of fp8, times ten
_LEAST_INT8_ROWS: Final = 17  # of a, for torch
MOST_GROUPS: Final = 1023  # of torch's grouped products
# What scales of a and of b are for: whole operands, or each row and each column.
_SCALES: Final = (("", ""), ("one", "one"), ("column", "row"))

Rows = tuple[tuple[float, ...], ...]


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of torch and cuBLAS that are in use; cuBLAS's is "" if no package names it."""
    names = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")
    found = {
        each.metadata["Name"]: each.version for name in names for each in metadata.distributions(name=name)
    }
    return {"torch": torch.__version__, "cublas": next(iter(found.values()), "")}


def illegal(problem: Tiled) -> str | None:
    """Say why torch may not compute a problem; None if one call of it gives the same result.

    A caller also has to ask torch's settings: see `tritile.ops.aten`.
    """
    if not isinstance(problem, Product | QuantizedProblem):
        return "torch's kernel is a candidate for products only"
    if problem.invariant:
        return "torch's sums depend on the number of rows"
    problem = product_of(problem)
    if isinstance(problem, GroupedProblem):
        return _illegal_groups(problem)
    if problem.precision == AS_TORCH and problem.rights == 1:
        return None
    if problem.dtype in FP8_DTYPES:
        return _illegal_fp8(problem)
    if problem.dtype == "int8":
        return _illegal_int8(problem)
    if problem.rights > 1 or problem.in_parts or problem.precision not in _PRECISIONS:
        return f"torch has no single call for {problem.label}"
    if "strided" in problem.layouts or problem.out_layout != "row":
        return "torch would copy an operand or the result"
    if not _is_in_one(problem) and not _is_long(problem):
        return "torch needs another launch for the epilogue"
    if problem.dtype not in _DTYPES:
        return f"torch's products of {problem.dtype} are not offered"
    return None if problem.out_dtype == problem.dtype else "torch returns another dtype"


def _is_in_one(problem: MatmulProblem) -> bool:
    """True if torch needs no launch besides the product's for the epilogue."""
    return problem.epilogue in _IN_ONE[: 1 if problem.batch > 1 else 2]


def _is_long(problem: MatmulProblem) -> bool:
    """True if launches that move the result once more, for an epilogue, hardly count, and round nothing.

    Of 16-bit types and float64 they cost what torch's products gain.
    """
    return problem.dtype == "float32" and problem.k >= _LONG[0] and problem.flops >= _LONG[1]


def is_compared(problem: Tiled) -> bool:
    """True if plans have torch's time: if torch may run, or fp16 parts take its place."""
    if isinstance(problem, MatmulProblem) and problem.in_parts:
        problem = replace(problem, precision="ieee")
    return illegal(problem) is None


def does_no_harm(problem: Tiled, device: Device) -> bool:
    """True if torch's kernel makes a product that nobody measured on a GPU like this one.

    It does if one launch makes it and torch is not known to be slow: of 16-bit types if all rows start
    on 16 bytes, and of fp32, fp64, int8 and fp8. torch multiplies fp8 from compute capability 8.9 on, and by
    blocks of scales on few GPUs. Its grouped products read sizes on the host, except on Hopper and Blackwell.
    """
    if not isinstance(problem, MatmulProblem) or illegal(problem) is not None:
        return False
    if problem.dtype in FP8_DTYPES:
        return device.nvidia >= _LEAST_FP8 and not problem.block_scales
    if problem.dtype == "int8":
        return device.nvidia > 0
    return _is_in_one(problem) and (problem.itemsize > 2 or min(problem.aligns) == 16)


def product_of(problem: Product | QuantizedProblem) -> Product:
    """Return the product that torch makes: by a quantized weight once that is unpacked in memory."""
    return problem.product if isinstance(problem, QuantizedProblem) else problem


def unpack_us(problem: Product | QuantizedProblem, device: Device) -> float:
    """Return predicted microseconds of unpacking a quantized weight for torch; 0 for another product."""
    if not isinstance(problem, QuantizedProblem):
        return 0.0
    moved = problem.weight_bytes + problem.unpacked_bytes
    return moved / (device.memory_gbps * _UNPACKED_SHARE * 1e3) + _UNPACK_US


def _illegal_bytes(problem: Product, multiple: int) -> str | None:
    """Say how operands of one byte an element have to lie, and which sizes torch requires."""
    if (problem.a_layout, problem.b_layout) != ("row", "column"):
        return "torch requires contiguous rows of a and columns of b"
    if min(problem.a_align, problem.b_align) < 16:
        return "torch requires rows of a and columns of b that start on 16 bytes"
    if problem.n % multiple or problem.k % multiple:
        return f"torch requires N and K in multiples of {multiple}, not {problem.n} and {problem.k}"
    return None


def _illegal_fp8(problem: MatmulProblem) -> str | None:
    if problem.batch > 1:
        return "torch multiplies fp8 one matrix at a time"
    if problem.dtype == "float8_e5m2" and problem.b_dtype != "float8_e4m3fn":
        return "torch does not multiply float8_e5m2 by float8_e5m2: expected float8_e4m3fn for a or b"
    fused = problem.epilogue
    if problem.block_scales:  # what is fused is applied to float32 by torch afterwards
        if (problem.dtype, problem.b_dtype) != ("float8_e4m3fn", ""):
            return "with a scale for each 128 of K torch requires float8_e4m3fn for a and b"
        return _illegal_bytes(problem, 16)
    scales = fused.scale_a, fused.scale_b
    if scales not in _SCALES and not (scales == ("one", "row") and problem.m == 1):
        return "torch requires one scale each for a and b, or one for each row and column"
    bare = Epilogue(*scales)
    with_bias = replace(bare, bias="row") if scales[0] and problem.out_dtype != "float32" else bare
    if fused not in (bare, with_bias):
        return "torch needs another launch for the epilogue"
    return "torch would copy the result" if problem.out_layout != "row" else _illegal_bytes(problem, 16)


def _illegal_int8(problem: MatmulProblem) -> str | None:
    if problem.epilogue or problem.out_dtype != "int32":
        return "torch needs another launch for scales"
    if problem.batch > 1 or problem.m < _LEAST_INT8_ROWS:
        return f"torch requires one matrix of {_LEAST_INT8_ROWS} rows or more"
    return "torch would copy the result" if problem.out_layout != "row" else _illegal_bytes(problem, 8)


def _illegal_groups(problem: GroupedProblem) -> str | None:
    if problem.groups > MOST_GROUPS:
        return f"torch requires at most {MOST_GROUPS} groups"
    if problem.dtype == "float8_e4m3fn" and problem.out_dtype == "bfloat16":
        return _illegal_bytes(problem, 16)
    if problem.needs_torch:
        return "torch requires float8_e4m3fn operands and a bfloat16 result"
    if (problem.dtype, problem.out_dtype) != ("bfloat16", "bfloat16"):
        return "torch reads offs on the host, except for bfloat16 and float8_e4m3fn"
    aligned = min(problem.a_align, problem.b_align) == 16 and problem.n % 8 == 0
    if problem.a_layout != "row" or problem.b_layout == "strided" or not aligned:
        return "torch requires rows of a, rows or columns of b, and rows of the result that start on 16 bytes"
    return None


def kind_of(problem: Product) -> str:
    """Return the kind of a product in a table's `by_aten`: "float32 ieee", "grouped bfloat16".

    "float8_e4m3fn fast rows" has scales for rows and columns.
    """
    if isinstance(problem, GroupedProblem):
        return f"grouped {problem.dtype}"
    rows = " rows" if problem.epilogue.scale_b == "row" else ""
    return f"{problem.dtype} {problem.precision}{rows}"


def matches_sweeps(problem: MatmulProblem) -> bool:
    """True for a product like those that the networks are fitted to: torch is not predicted at others.

    Sweeps of fp8 hold sums that leave the tensor cores, and no scales or one for each operand.
    """
    if problem.dtype in FP8_DTYPES and (problem.precision != "ieee" or problem.epilogue.scale_b == "row"):
        return False
    plain = problem.batch == 1 and problem.a_layout == problem.out_layout == "row"
    return plain and min(problem.n, problem.k) >= SIDES[0] and problem.flops >= OPERATIONS[0]


def features(problem: MatmulProblem, device: Device) -> tuple[Any, float]:
    """Return the inputs (inputs,) of the network, and the microseconds that its output multiplies."""
    m, n, k, batch, processors = problem.m, problem.n, problem.k, problem.batch, device.processors
    area, size = m * n * batch, problem.itemsize
    moved = batch * (m * k + n * k) * size + area * ITEMSIZE[problem.out_dtype]
    compute, memory = area * k * size / _PRODUCTS_PER_US, moved / _BYTES_PER_US
    floor = max(compute, memory) + _START_US
    sides = np.array([[m], [n]])
    tiles = (-(-sides // _TILES)).prod(0) * batch
    waves = tiles / processors
    full = np.where(waves < _FULL_WAVES, np.ceil(waves) / waves, 1.0)
    covered = tiles * _TILES[0] * _TILES[1] / area
    # Share of the SMs' time that goes into the result, by the tile width that suits best.
    sides = sides[:, :, None]
    rounds = np.ceil(-(-sides // _SIDES) * -(-sides[::-1] // _STEPS) * batch / processors)
    best = (area / (rounds * processors * _AREAS) / _SLOWER).max(2)
    logs = [m, n, k, area, area * k, moved, min(m, n), max(m, n), compute, memory, floor]
    logs += [math.gcd(stride, 256) for stride in leading_strides(problem)]
    rest = [m % 64 / 64, m % 128 / 128, n % 64 / 64, n % 128 / 128, m % 8 == 0, problem.b_layout == "row"]
    return np.concatenate([np.log2([*logs, *waves]), full, covered, *best, rest]), floor


INPUTS: Final = 14 + 3 * _TILES.shape[1] + 2 * len(_SIDES) + 6


@dataclass(frozen=True)
class AtenTimes:
    """Predict torch's times for problems of the `classes` that it was fitted to.

    - `ranges`: the least and the largest of each input; what is beyond counts as these.
    - `layers`: of each layer, what is added to each unit's sum, then its slopes.
    - `error`: standard deviation of log(measured / predicted), at `sizes` sizes that were left out.
    - `margin`: how many times as long the other backend's pick has to be predicted to take, for torch's
      kernel to run: the factor by which calls at those sizes were fastest.
    - `versions`: of torch and cuBLAS, as they were timed.
    """

    classes: tuple[str, ...]
    ranges: Rows
    layers: tuple[Rows, Rows, Rows]
    error: float
    margin: float
    sizes: int
    versions: Mapping[str, str]

    @functools.cached_property
    def _arrays(self) -> tuple[Any, ...]:
        return tuple(map(np.array, (self.ranges, *self.layers)))

    def us(self, problem: MatmulProblem, device: Device) -> float:
        """Return predicted microseconds."""
        inputs, floor = features(problem, device)
        return float(floor * np.exp(self.factors(inputs)))

    def factors(self, inputs: Any) -> Any:
        """Return log(microseconds / floor) for inputs (..., inputs)."""
        ranges, *hidden, last = self._arrays
        units = np.clip(inputs, *ranges)
        for layer in hidden:
            units = np.maximum(units @ layer[:, 1:].T + layer[:, 0], 0.0)
        return units @ last[0, 1:] + last[0, 0]

    def to_dict(self) -> dict[str, Any]:
        def rounded(rows: Rows) -> list[list[float]]:
            return [[float(f"{value:.4g}") for value in row] for row in rows]

        return {
            "margin": self.margin,
            "sizes": self.sizes,
            "classes": list(self.classes),
            "ranges": rounded(self.ranges),
            "layers": [rounded(rows) for rows in self.layers],
            "error": round(self.error, 4),
            "versions": dict(self.versions),
        }


def aten_times_of(data: Any) -> AtenTimes:
    """Return what `AtenTimes.to_dict` gave. Raises InvalidValueError for anything else."""
    names = [field.name for field in fields(AtenTimes)]
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise InvalidValueError(f"aten: expected {', '.join(names)}")
    one, two = LAYERS
    shapes = ((one, 1 + INPUTS), (two, 1 + one), (1, 1 + two))
    try:
        classes, used = tuple(data["classes"]), dict(data["versions"])
        layers = zip(data["layers"], shapes, strict=True)
        first, second, last = (rows_from("aten", rows, *shape, _LARGEST) for rows, shape in layers)
    except (TypeError, ValueError) as fault:
        raise InvalidValueError(f"aten: {str(fault)[:200]}") from fault
    if not classes or not all(isinstance(each, str) and each in MEASURED for each in classes):
        raise InvalidValueError(f"aten: classes {str(classes)[:80]}: expected some of {', '.join(MEASURED)}")
    if not all(isinstance(text, str) for text in (*used, *used.values())):
        raise InvalidValueError("aten: expected versions by name")
    ranges = rows_from("aten", data["ranges"], 2, INPUTS, _LARGEST)
    error, margin = numbers_from("shares", [data["error"], data["margin"]], 2, 0, _LARGEST)
    (sizes,) = numbers_from("sizes", [data["sizes"]], 1, 1, 1 << 31)
    return AtenTimes(classes, ranges, (first, second, last), error, margin, int(sizes), used)
