"""Problems: how permutations are merged and widened; what is written, read back, posed and refused."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import tritile
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.epilogue import Epilogue
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import (
    BLOCK_SCALES,
    GroupedProblem,
    MatmulProblem,
    QuantizedProblem,
    problem_from_dict,
    problem_key,
    problem_to_dict,
)
from tritile.errors import InvalidValueError
from tritile.families.permute import family as permute
from tritile.ops.linear_quantized import quantized_call
from tritile.tune.suites import parse_shape


def strides_of(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def permuted(shape, dims, itemsize=4, **rest):
    moved = [shape[dim] for dim in dims]
    steps = strides_of(shape)
    return PermuteProblem.of(moved, [steps[dim] for dim in dims], strides_of(moved), itemsize, **rest)


@pytest.mark.parametrize(
    ("shape", "dims", "wanted"),
    [
        ((4, 6, 8), (0, 1, 2), ((192,), (1,), (1,))),
        ((4, 6, 8), (2, 0, 1), ((8, 24), (1, 8), (24, 1))),
        ((4, 1, 6, 1), (2, 1, 0, 3), ((6, 4), (1, 6), (4, 1))),
        ((1, 1), (1, 0), ((), (), ())),
    ],
)
def test_dimensions_that_stay_together_are_one(shape, dims, wanted):
    found = permuted(shape, dims, 8)
    assert (found.shape, found.x_strides, found.out_strides) == wanted
    assert problem_from_dict(problem_to_dict(found)) == found


@pytest.mark.parametrize(
    ("row", "words", "itemsize"),
    [
        (4, {}, 8),
        (6, {}, 4),
        (3, {}, 2),
        (4, {"addresses": (4, 0)}, 4),
        (4, {"widen": False}, 2),
        (512, {}, 2),  # loads of them are wide as they are
    ],
)
def test_short_rows_move_as_wider_words(row, words, itemsize):
    assert permuted((5, 7, row), (1, 0, 2), 2, **words).itemsize == itemsize


@pytest.mark.parametrize("seed", range(60))
def test_tiles_and_adjacent_elements(seed):
    draw = random.Random(seed)
    shape = [draw.choice((2, 3, 4, 6, 8, 40)) for _ in range(draw.randint(1, 5))]
    problem = permuted(shape, draw.sample(range(len(shape)), len(shape)), draw.choice((1, 4, 8)))
    m, n, batch = problem.plane
    assert sorted((*m, *n, *batch)) == list(range(len(problem.shape)))
    assert math.prod((problem.m, problem.n, problem.batch)) == math.prod(problem.shape)
    blocks = draw.choice((1, 4, 32, 128)), draw.choice((1, 4, 32, 128))
    sizes = []
    for group, side in zip((m, n), blocks, strict=True):
        for i in group:
            sizes.append((i, min(problem.shape[i], max(1, side))))
            side //= problem.shape[i]
    for steps, run in zip((problem.x_strides, problem.out_strides), problem.runs(*blocks), strict=True):
        places = {
            sum(at * steps[i] for at, (i, _) in zip(index, sizes, strict=True))
            for index in itertools.product(*(range(size) for _, size in sizes))
        }
        assert set(range(run)) <= places


def test_output_without_strides():
    problem = PermuteProblem((4, 4), (4, 1), (0, 0), 4)
    assert (problem.m * problem.n * problem.batch, problem.runs(16, 16)[1]) == (16, 1)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 23, 255, 256, 257, 2**20 - 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_digits_divide_as_whole_numbers_do(size):
    ((given, magic, shift),) = permute.digits((size, 9))
    assert given == size
    assert -(2**31) <= magic < 0
    near = [
        index + by for index in range(0, 2**31, max(size, 2**31 // 997 // size * size)) for by in (-1, 0, 1)
    ]
    for index in [0, size - 1, size, 2**31 - 1, *near]:
        if 0 <= index < 2**31:
            assert (index * (magic + 2**32) >> 32) >> shift == index // size


PLAIN = MatmulProblem(1, 64, 48, 256, "float8_e4m3fn", "bfloat16")
GROUPS = GroupedProblem(64, 16384, 2048, 4096, "bfloat16", "bfloat16", b_layout="column")
PACKED = QuantizedProblem(16, 4096, 8192, "bfloat16", 4, 128)
FIELDS = [
    {"epilogue": "scale_a=column scale_b=row bias=row weighted gelu"},
    {"dtype": "bfloat16", "epilogue": "bias=row bias_up=full gated silu"},
    {"dtype": "int8", "epilogue": "scale_a=one scale_b=row"},
    {"b_dtype": "float8_e5m2"},
    *({"block_scales": name} for name in BLOCK_SCALES if name),
    {"epilogue": "residual=full silu", "b_dtype": "float8_e5m2", "block_scales": "1x128"},
    {"invariant": True},
]


@pytest.mark.parametrize("changes", FIELDS, ids=str)
def test_problem_prints_changes_only(changes):
    problem = replace(PLAIN, **changes)
    assert problem_from_dict(problem_to_dict(problem)) == problem
    assert problem_key(problem) != problem_key(PLAIN)
    assert problem.kind != PLAIN.kind
    assert set(problem_to_dict(problem)) - set(problem_to_dict(PLAIN)) == set(changes) - {"dtype"}
    for word in " ".join(filter(None, (each for each in changes.values() if each is not True))).split():
        assert word in problem.label


@pytest.mark.parametrize(
    "problem",
    [
        GROUPS,
        replace(GROUPS, dtype="float8_e4m3fn", scaled=True),
        replace(GROUPS, invariant=True),
        PACKED,
        QuantizedProblem(3, 40, 130, "float16", 8, 32, True, True, "strided", 4),
        replace(PACKED, invariant=True),
    ],
    ids=lambda problem: problem.label,
)
def test_groups_and_packed_read_back(problem):
    assert problem_from_dict(problem_to_dict(problem)) == problem
    if not getattr(problem, "scaled", False):  # which only torch computes
        assert call_for(problem).problem == problem


LAYOUTS = ("row", "column", "strided")


@pytest.mark.parametrize("aligns", [(4, 8, 8), (8, 4, 8), (8, 8, 4)], ids=str)
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=3)), ids="-".join)
def test_call_of_problem_no_overlap(layouts, aligns):
    for problem in (
        MatmulProblem(2, 5, 3, 7, "float32", "float32", *layouts, *aligns, epilogue="bias=row gated silu"),
        GroupedProblem(2, 5, 3, 7, "float32", "float32", *layouts, *aligns),
    ):
        call = call_for(problem, lambda dtype, count: torch.empty(count, dtype=getattr(torch, dtype)))
        assert call.problem == problem
        batches = (2, 2, 2) if problem.op == "matmul" else (1, 2, 1)
        for view, batch in zip((call.a, call.b, call.out), batches, strict=True):
            steps = (*(view.batch_strides or (0,)), *view.strides)
            laid = view.tensor.as_strided((batch, *view.shape), steps)
            numbers = torch.arange(laid.numel(), dtype=torch.float32).view(laid.shape)
            assert torch.equal(laid.copy_(numbers), numbers)


IMPOSSIBLE = [
    *((PLAIN, {"epilogue": text}) for text in ("gelu bias=row", "bias=diagonal", "tanh", "gated silu")),
    (PLAIN, {"epilogue": "bias=row bias=row"}),
    (PLAIN, {"b_dtype": "float8_e4m3fn"}),
    *((PLAIN, {f"{name}_layout": "diagonal"}) for name in ("a", "b", "out")),
    *((PLAIN, {f"{name}_align": value}) for name in ("a", "b", "out") for value in (3, 16.0, True)),
    *((PLAIN, {name: "diagonal"}) for name in ("out_dtype", "precision")),
    *((PLAIN, {name: 0}) for name in ("batch", "m", "n", "k", "invariant")),
    (PLAIN, {"block_scales": "1x64"}),
    (PLAIN, {"block_scales": "1x128", "batch": 2}),
    (PLAIN, {"epilogue": "gated silu", "dtype": "float32", "precision": "fp16x3"}),
    (PLAIN, {"dtype": "complex64", "out_dtype": "complex64"}),
    (PLAIN, {"epilogue": "bias_up=row silu", "dtype": "float16"}),
    (PLAIN, {"epilogue": "silu gated", "dtype": "float16"}),
    (PLAIN, {"epilogue": "zero_a=one", "dtype": "int8"}),
    *((GROUPS, {"groups": value}) for value in (0, 1025)),
    *((GROUPS, {name: "int8"}) for name in ("dtype", "out_dtype")),
    (GROUPS, {"m": 2**31}),
    (GROUPS, {"k": 4.0}),
    (GROUPS, {"a_layout": "odd"}),
    (GROUPS, {"b_align": 3}),
    (GROUPS, {"precision": "fast"}),
    *((GROUPS, {name: 1}) for name in ("scaled", "invariant")),
    *((PACKED, {name: 0}) for name in ("m", "n", "k")),
    *((PACKED, {"bits": value}) for value in (5, True)),
    (PACKED, {"dtype": "float32"}),
    (PACKED, {"group_size": 48}),
    *((PACKED, {name: 1}) for name in ("zero_points", "invariant")),
    (PACKED, {"bias": None}),
    (PACKED, {"x_layout": "column"}),
    (PACKED, {"x_align": 3}),
]


@pytest.mark.parametrize(("problem", "changes"), IMPOSSIBLE, ids=str)
def test_problems_that_cannot_be(problem, changes):
    with pytest.raises(InvalidValueError):
        replace(problem, **changes)


@pytest.mark.parametrize(
    "values",
    [
        ((4, 4), (4, 1), (4,), 4),
        ((4, True), (4, 1), (1, 4), 4),
        ((4, 4), (4, -1), (1, 4), 4),
        ((4, 4), (4, 1.0), (1, 4), 4),
        (("4", 4), (4, 1), (1, 4), 4),
        ((4, 4), (4, 1), (1, 4), 3),
    ],
    ids=str,
)
def test_permutations_that_cannot_be(values):
    for make in (PermuteProblem, PermuteProblem.of):
        with pytest.raises(InvalidValueError, match="expected"):
            make(*values)


@pytest.mark.parametrize("sizes", [(0, 2, 2), (1, -2, 2), (1.0, 2, 2), (True, 2, 2)], ids=str)
def test_transposed_matrices_have_sizes(sizes):
    with pytest.raises(InvalidValueError, match="sizes of 1"):
        PermuteProblem.transposed(*sizes, 4)


def test_epilogues_read_back():
    spreads, sides = ("", "one", "row", "column", "full"), ("scale_a", "scale_b", "bias", "residual")
    for *given, activation, weighted in itertools.product(
        spreads, spreads, spreads, spreads, ("", "relu", "gelu", "gelu_tanh", "silu"), ("", "weighted")
    ):
        words = [f"{side}={spread}" for side, spread in zip(sides, given, strict=True) if spread]
        text = " ".join([*words, *filter(None, (weighted, activation))])
        epilogue = Epilogue.parse(text)
        assert str(epilogue) == text
        assert (epilogue.constants is None) == (text == "")


def test_packed_weight_problem_and_bytes():
    ones = torch.ones(40, 130, dtype=torch.float16)
    weight = tritile.quantize(ones, bits=8, group_size=32, zero_points=True)
    x, out = torch.ones(3, 130, dtype=torch.float16), torch.empty(3, 40, dtype=torch.float16)
    call = quantized_call(x, weight, torch.ones(40), out)
    problem = QuantizedProblem(3, 40, 130, "float16", 8, 32, True, True, "row", 4)
    assert call.problem == problem
    assert (problem.words, problem.scales) == (weight.packed.shape, weight.scales.shape)
    assert problem.weight_bytes == weight.nbytes
    assert problem.bytes == weight.nbytes + 2 * (3 * 130 + 3 * 40 + 40)
    given = [weight.packed, weight.scales, weight.zeros]
    assert [t.dtype for t in call.tensors] == [x.dtype, *(t.dtype for t in given), torch.float32, x.dtype]
    assert quantized_call(x.t().contiguous().t(), weight, None, out).problem.x_layout == "strided"
    assert quantized_call(x[:1], weight, None, out[:1]).problem.x_align == 16  # no row is stepped over


@pytest.mark.parametrize(
    ("text", "op", "words", "wanted"),
    [
        ("64x16384x2048x4096", "grouped", {"layout": "NT"}, GROUPS),
        (
            "3x40x130",
            "linear_quantized",
            {"dtype": "float16", "layout": "int8/64 zeros"},
            QuantizedProblem(3, 40, 130, "float16", 8, 64, True, x_align=4),
        ),
        ("3x40x128", "linear_quantized", {}, QuantizedProblem(3, 40, 128, "bfloat16", 4, 128)),
    ],
)
def test_shapes_that_people_write(text, op, words, wanted):
    assert parse_shape(text, op, **words).problem == wanted


@pytest.mark.parametrize(
    ("text", "op", "words"),
    [
        ("64x128x128", "grouped", {}),
        ("0x8x8x8", "grouped", {}),
        ("2x3x40x130", "linear_quantized", {"layout": "int4/128"}),
        ("3x40x130", "linear_quantized", {"dtype": "float32", "layout": "int4/128"}),
        ("3x40x130", "linear_quantized", {"dtype": "float16", "layout": "int4/48"}),
    ],
)
def test_shapes_that_nobody_means(text, op, words):
    with pytest.raises(InvalidValueError, match=r"expected|at least 1|takes bfloat16, float16"):
        parse_shape(text, op, **words)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config.of(8, 2, "tile", BLOCK_M=64, EVEN=True, KIND="nn"),
        Config.of(RATE=0.5).derived(num_ctas=2, maxnreg=128),
    ],
    ids=str,
)
def test_config_prints_constructor(config):
    assert eval(repr(config)) == config
