"""Products of complex numbers as problems: which form makes them, of which core, and what is refused."""

import itertools

import pytest
import torch

from tests.complexes import numbers
from tests.reference import LAYOUTS, placed
from tritile.core.problem import MatmulProblem, problem_from_dict, problem_to_dict
from tritile.core.problem.complexes import form_of, moved
from tritile.errors import InvalidValueError
from tritile.families.work import lowered
from tritile.ops.described import described

SIZES = [(35, 10, 21), (3, 35, 18), (64, 64, 64), (1, 40, 9), (17, 1, 5), (5, 6, 1), (1, 1, 1)]
PRECISIONS = ("ieee", "tf32-3m")


def problem(m=64, n=64, k=64, dtype="complex64", **rest):
    return MatmulProblem(**({"batch": 1, "out_dtype": dtype} | rest), m=m, n=n, k=k, dtype=dtype)


def calls(precision, batch=()):
    """Products of every layout, conjugated or not."""
    for size, layouts in itertools.product(SIZES, itertools.product(LAYOUTS, repeat=2)):
        m, n, k = size
        a = placed(numbers((*batch, m, k), torch.complex64), layouts[0])
        b = placed(numbers((*batch, k, n), torch.complex64, 1), layouts[1])
        out = torch.empty((*batch, m, n), dtype=torch.complex64)
        yield described(a, b.conj(), out, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_the_core_that_is_judged_is_the_core_that_is_made(precision, batch):
    for call in calls(precision, batch):
        judged, made = call.problem.core, lowered(call, False).core.problem
        assert judged.dtype == "float32"
        sizes = [(each.batch, each.m, each.n, each.k, each.precision) for each in (judged, made)]
        assert sizes[0] == sizes[1]
        for name in ("a", "b", "out"):
            layout = getattr(judged, f"{name}_layout")
            operand = dict(zip(["a", "b", "out"], judged.operands, strict=True))[name]
            if min(operand.shape[1:]) > 1:  # else both layouts are one
                assert getattr(made, f"{name}_layout") == layout, (call.problem, name)
            assert getattr(made, f"{name}_align") >= 8


def test_workspaces_hold_what_is_laid_out():
    """Every launch that lays out ends within its workspace: strides times sizes, rows padded to 16 bytes."""
    for precision, batch in itertools.product(PRECISIONS, [(), (3,)]):
        for call in calls(precision, batch):
            parts = lowered(call, False)
            for step in (*parts.before, *parts.after):
                values = step.args
                place = values["copy" if "copy" in values else "source"]
                section = parts.scratch[place.buffer]
                assert values["stride_row"] % 4 == 0
                assert section.elements == values["batch"] * values["stride_matrix"]


def test_the_form_that_moves_least_is_taken():
    small, large = {"m": 16, "n": 512, "k": 512}, {"m": 512, "n": 64, "k": 512}
    assert form_of(problem(**small)) == "pairs"
    assert form_of(problem(**small, b_layout="column")) == "planes"
    assert form_of(problem(**small, b_layout="strided")) == "pairs"
    assert form_of(problem(**large)) == form_of(problem(**large, b_layout="column")) == "embedded"
    assert form_of(problem()) == "embedded"
    assert form_of(problem(**small, precision="tf32x3-3m")) == "three"
    one = problem(**small, b_layout="column")
    assert moved(one)["planes"] == min(moved(one).values())


@pytest.mark.parametrize(
    ("fields", "core"),
    [
        ({}, (1, 64, 128, 128, "row", "row", 16, 16, 16)),
        ({"a_align": 8, "out_align": 8}, (1, 64, 128, 128, "row", "row", 8, 16, 8)),
        ({"a_layout": "column", "a_align": 8}, (1, 64, 128, 128, "column", "row", 16, 16, 16)),
        ({"a_layout": "strided", "b_layout": "strided", "n": 9}, (1, 64, 18, 128, "row", "row", 16, 16, 16)),
        ({"m": 2, "b_align": 8}, (1, 4, 128, 64, "row", "row", 16, 8, 16)),
        ({"m": 2, "b_align": 8, "b_layout": "column"}, (1, 4, 64, 128, "row", "column", 16, 8, 16)),
        ({"precision": "ieee-3m", "batch": 2}, (6, 64, 64, 64, "row", "row", 16, 16, 16)),
    ],
    ids=str,
)
def test_cores(fields, core):
    found = problem(**fields).core
    layouts = (found.a_layout, found.b_layout)
    aligns = (found.a_align, found.b_align, found.out_align)
    assert (found.batch, found.m, found.n, found.k, *layouts, *aligns) == core
    assert (found.dtype, found.out_dtype, found.out_layout) == ("float32", "float32", "row")
    assert found.precision == "ieee"
    assert found.core is found


def test_work_is_counted_as_four_products_whatever_makes_it():
    one = problem(5, 6, 7)
    assert one.flops == 8 * 5 * 6 * 7 == one.core.flops
    assert problem(5, 6, 7, precision="ieee-3m").core.flops == 6 * 5 * 6 * 7
    assert one.bytes == 8 * (5 * 7 + 7 * 6 + 5 * 6)
    assert problem(5, 6, 7, "complex128").bytes == 2 * one.bytes


@pytest.mark.parametrize("precision", ["ieee", "ieee-3m"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_problems_survive_being_written(dtype, precision):
    one = problem(dtype=dtype, precision=precision)
    assert problem_from_dict(problem_to_dict(one)) == one
    assert precision in one.label
    assert one.core.dtype == {"complex64": "float32", "complex128": "float64"}[dtype]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"precision": "3m"}, "ieee-3m"),
        ({"precision": "fast"}, "a precision of"),
        ({"dtype": "complex128", "precision": "tf32"}, "a precision of ieee, ozaki, ieee-3m, ozaki-3m"),
        ({"dtype": "float32", "precision": "ieee-3m"}, "a precision of"),
        ({"out_dtype": "float32"}, "one dtype"),
        ({"out_dtype": "complex128"}, "one dtype"),
        ({"dtype": "float32", "out_dtype": "complex64"}, "one dtype"),
        ({"epilogue": "bias=row"}, "nothing fused"),
        ({"b_dtype": "float8_e5m2"}, "b_dtype"),
        ({"block_scales": "1x1"}, "block scales"),
    ],
    ids=str,
)
def test_what_is_no_problem_is_refused(fields, wanted):
    with pytest.raises(InvalidValueError, match=wanted):
        problem(**fields)
