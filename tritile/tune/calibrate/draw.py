"""Draw problems of a class, over the whole range of sizes in which calls of the class are expected.

Half of the dense products are drawn by size, whatever their time, and half among those of at least `LONG_US`,
where nearly all of a user's time goes.
"""

import math
import random
from collections.abc import Callable
from typing import Any, Final

from tritile.choose.classes import MOVED, OPERATIONS, ROWS, SIDES, class_of
from tritile.core.problem import MatmulProblem, Tiled
from tritile.tune.suites import OF_ITEMSIZE, Case

_LAYOUTS: Final = ("NN", "NT")
_NAME: Final = "calibration"
_MAX_WEIGHT: Final = 1 << 29  # elements of a packed weight
LONG_US: Final = 20.0  # least time, by `limits_us`, of products drawn by time
# The best of an H200: bf16 products of committed lines, copies, an empty kernel in a graph.
ROOF_TFLOPS: Final = 800.0
ROOF_SHARE: Final = 0.883  # of the vendor's bandwidth
MEMORY_GBPS: Final = 4800.0  # the vendor's bandwidth of an H200
ROOF_US: Final = 1.5

Dice = random.Random
Draw = Callable[[Dice, int], Case]  # draws a case of the class; the number counts the cases


def log_uniform(dice: Dice, low: float, high: float) -> int:
    """Draw a whole number whose logarithm is uniform in the range."""
    return round(math.exp(dice.uniform(math.log(low), math.log(high))))


def sized(dice: Dice, low: int, high: int, unit: int) -> int:
    """Draw a multiple of `unit` whose logarithm is about uniform in the range."""
    return max(unit, round(log_uniform(dice, low, high) / unit) * unit)


def limits_us(
    problem: MatmulProblem, memory_gbps: float = MEMORY_GBPS, slow: float = 1.0
) -> tuple[float, float]:
    """Return lower bounds of a product's microseconds on Hopper: by its operations, and by its bytes.

    `memory_gbps` is the vendor's bandwidth. `slow`: the time of an operation relative to one of 16-bit types.
    """
    return slow * problem.flops / (ROOF_TFLOPS * 1e6), problem.bytes / (memory_gbps * ROOF_SHARE * 1e3)


def _product(
    dice: Dice, number: int, dtype: str, layout: str, units: tuple[int, int], slow: float, **how: Any
) -> Case:
    """Draw a product within the range of operations; `slow` is that of `limits_us`."""
    least_us = LONG_US if number % 4 > 1 else 0.0
    while True:
        m = log_uniform(dice, 1, ROWS)
        n, k = (sized(dice, *SIDES, unit) for unit in units)
        if OPERATIONS[0] <= 2 * m * n * k * slow <= OPERATIONS[1]:
            case = Case(_NAME, "matmul", dtype, layout, m=m, n=n, k=k, **how)
            assert isinstance(case.problem, MatmulProblem)
            if max(limits_us(case.problem, slow=slow)) >= least_us:
                return case


def _units(dice: Dice, least: int) -> tuple[int, int]:
    """Draw the units of N and K: mostly 64, else `least`."""
    unit = 64 if dice.random() < 0.7 else least
    return unit, unit


def _unaligned(dice: Dice, number: int) -> Case:
    units = dice.choice(((1, 1), (1, 1), (1, 64), (64, 1), (2, 2), (4, 4)))
    while True:
        case = _product(dice, number, "bfloat16", _LAYOUTS[number % 2], units, 2.0)
        if case.n % 8 or case.k % 8:
            return case


def permutation(dice: Dice, itemsize: int, unit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw shape and dims that move some dimension; sizes above `unit` are multiples of it."""
    while True:
        rank = dice.randint(2, 5)
        elements = log_uniform(dice, MOVED[0] / itemsize, MOVED[1] / itemsize)
        cuts = sorted(dice.uniform(0, math.log(elements)) for _ in range(rank - 1))
        spans = zip([0.0, *cuts], [*cuts, math.log(elements)], strict=True)
        logs = [high - low for low, high in spans]
        shape = tuple(
            max(1, round(math.exp(each) / unit)) * unit
            if each > math.log(unit)
            else max(2, round(math.exp(each)))
            for each in logs
        )
        dims = tuple(dice.sample(range(rank), rank))
        if MOVED[0] <= math.prod(shape) * itemsize <= MOVED[1] and dims != tuple(range(rank)):
            return shape, dims


def _weight(dice: Dice, number: int) -> Case:
    while True:
        m, (n, k) = log_uniform(dice, 1, 4096), (sized(dice, 256, 32768, 128) for _ in range(2))
        if OPERATIONS[0] <= 2 * m * n * k <= OPERATIONS[1] and n * k <= _MAX_WEIGHT:
            return Case(_NAME, "linear_quantized", "bfloat16", "int4/128", m=m, n=n, k=k)


def _permuted(name: str, sizes: tuple[int, ...]) -> Draw:
    def draw(dice: Dice, number: int) -> Case:
        while True:
            size = dice.choice(sizes)
            shape, dims = permutation(dice, size, dice.choices((64, 8, 1), (60, 20, 20))[0])
            case = Case(_NAME, "permute", OF_ITEMSIZE[size], shape=shape, dims=dims)
            if class_of(case.problem) == name:
                return case

    return draw


DRAWS: Final[dict[str, Draw]] = {
    "bf16_nn": lambda dice, number: _product(dice, number, "bfloat16", "NN", _units(dice, 8), 1.0),
    "bf16_nt": lambda dice, number: _product(dice, number, "bfloat16", "NT", _units(dice, 8), 1.0),
    "unaligned_16bit": _unaligned,
    "fp16x3": lambda dice, number: _product(
        dice, number, "float32", _LAYOUTS[number % 2], _units(dice, 4), 3.0, precision="fp16x3"
    ),
    "fp8": lambda dice, number: _product(dice, number, "float8_e4m3fn", "NT", _units(dice, 16), 0.5),
    "int8": lambda dice, number: _product(dice, number, "int8", "NT", _units(dice, 16), 0.5),
    "int4": _weight,
    **{f"permute_{size}": _permuted(f"permute_{size}", tuple(OF_ITEMSIZE)) for size in OF_ITEMSIZE},
    "inner_dim_kept": _permuted("inner_dim_kept", tuple(OF_ITEMSIZE)),
}


def drawn(name: str, count: int, seed: str) -> list[Tiled]:
    """Draw `count` problems of a class; another seed draws others."""
    dice = random.Random(f"{name} {seed}")
    return [DRAWS[name](dice, number).problem for number in range(count)]
