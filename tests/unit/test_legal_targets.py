"""Every target that tritile supports has a legal config of a Triton kernel, whatever else may run it."""

import itertools
from dataclasses import replace

import pytest

from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import FP8_DTYPES, GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal

GPUS = "a100", "l40s", "h200", "b200", "mi300x"
HALVES = "float16", "bfloat16"
# (dtype, precision), and the dtypes of results.
OUTS = {
    **{(half, "ieee"): (half, "float32") for half in HALVES},
    **{("float32", precision): ("float32",) for precision in ("ieee", "tf32", "fp16x3")},
    ("float64", "ieee"): ("float64",),
    **{(fp8, precision): ("bfloat16", "float32") for fp8 in FP8_DTYPES for precision in ("ieee", "fast")},
    ("int8", "ieee"): ("int32", "bfloat16"),
}
PLAIN = "", "bias=row gelu", "residual=full silu", "bias=full weighted", "scale_a=column scale_b=row bias=row"
GATED = "gated silu", "bias=row bias_up=row gated gelu"
SIZES = (1, 1024, 1024, 1024), (1, 3, 1024, 1024), (1, 1024, 1, 1024), (3, 131, 77, 35)
LAYOUTS = "row", "column", "strided"


def products(dtype, precision):
    """Yield products: sizes, layouts, alignments, dtypes of results, epilogues, batch-invariant or not."""
    gated = GATED if dtype in ("float64", "float32", *HALVES) and precision != "fp16x3" else ()
    for (batch, m, n, k), out_dtype in itertools.product(SIZES, OUTS[dtype, precision]):
        base = MatmulProblem(batch, m, n, k, dtype, out_dtype, precision=precision)
        odd = base.itemsize
        for a, b, out, (align, out_align), epilogue, invariant in itertools.product(
            LAYOUTS, LAYOUTS, LAYOUTS[:2], ((16, 16), (odd, odd), (16, odd)), (*PLAIN, *gated), (False, True)
        ):
            yield replace(
                base, a_layout=a, b_layout=b, out_layout=out, a_align=align, b_align=align,
                out_align=out_align, epilogue=epilogue, invariant=invariant,
            )  # fmt: skip


def groups():
    kinds = (("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"))
    for (dtype, precision), a, b, align, invariant in itertools.product(
        kinds, LAYOUTS[:2], LAYOUTS[:2], (16, 4), (False, True)
    ):
        yield GroupedProblem(
            4, 512, 384, 256, dtype, dtype, a, b, "row", align, align, align, precision,
            invariant=invariant,
        )  # fmt: skip


def packed():
    flags = (False, True)
    for m, dtype, bits, group, zeros, bias, layout, align, invariant in itertools.product(
        (1, 64, 1024), HALVES, (4, 8), (32, 64, 128), flags, flags, LAYOUTS[::2], (16, 2), flags
    ):
        yield QuantizedProblem(m, 384, 520, dtype, bits, group, zeros, bias, layout, align, invariant)


def permutations():
    for size, batch, m, n in itertools.product((1, 2, 4, 8, 16), (1, 3), (1003, 1024), (3, 2048)):
        yield PermuteProblem.transposed(batch, m, n, size)


def is_supported(problem, device):
    """False for what has no config by rule: a target that loses its last config has to be named here."""
    if not isinstance(problem, MatmulProblem):
        return True
    if problem.dtype in FP8_DTYPES and 0 < device.nvidia < 89:
        return False
    if problem.precision == "tf32" and problem.invariant and device.has_tma:
        return problem.out_layout == "row" or problem.n == 1  # TMA rounds, and stores rows
    return problem.precision != "fp16x3" or (device.nvidia >= 80 and not problem.invariant)


def without_config(problems, device):
    """The supported problems for which no config is legal."""
    recent, found = [], []  # configs that were legal are tried first: spaces hold thousands
    for problem in problems:
        if not is_supported(problem, device):
            continue
        spaces = [recent, *(family.configs for family in FAMILIES[problem.op].values())]
        tried = itertools.chain.from_iterable(spaces)
        config = next((each for each in tried if illegal(each, problem, device) is None), None)
        if config is None:
            found.append(problem.label)
        elif config not in recent:
            recent.insert(0, config)
    return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("dtype", "precision"), OUTS)
def test_every_product_has_a_legal_config(dtype, precision, gpu):
    found = without_config(products(dtype, precision), target_device(gpu))
    assert not found, f"{len(found)}: {found[:5]}"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("drawn", [groups, packed, permutations])
def test_every_other_operation_has_a_legal_config(drawn, gpu):
    found = without_config(drawn(), target_device(gpu))
    assert not found, f"{len(found)}: {found[:5]}"
