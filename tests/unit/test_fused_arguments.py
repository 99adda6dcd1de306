"""Wrong calls of products with epilogues: each raises its own error, before any launch."""

import itertools
from dataclasses import replace

import pytest
import torch

import tritile
from tests.wrong_calls import assert_refused, cases, recorded
from tritile import errors
from tritile.core.problem import (
    BLOCK_SCALES,
    MatmulProblem,
    epilogue_of,
    problem_from_dict,
    problem_key,
    problem_to_dict,
)

FP8, INT8 = torch.float8_e4m3fn, torch.int8


def f32(*shape):
    return torch.zeros(shape)


def typed(dtype, *shape):
    return torch.zeros(shape, dtype=dtype)


def linear(*args, **kwargs):
    return lambda: tritile.linear(*args, **kwargs)


def addmm(*args, **kwargs):
    return lambda: tritile.addmm(*args, **kwargs)


def baddbmm(*args, **kwargs):
    return lambda: tritile.baddbmm(*args, **kwargs)


def scaled(*args, **kwargs):
    return lambda: tritile.scaled_matmul(*args, **kwargs)


def gated(*args, **kwargs):
    return lambda: tritile.gated_linear(*args, **kwargs)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Every launch is recorded, and none happens."""
    return recorded(monkeypatch)


X, W, BIAS, OUT, S = f32(3, 5), f32(7, 5), f32(7), f32(3, 7), f32(5, 5)
A8, B8, ONE = typed(FP8, 3, 256), typed(FP8, 256, 7), f32()
I8, J8 = typed(INT8, 3, 4), typed(INT8, 4, 7)
META = torch.zeros(7, device="meta")
BASE = torch.zeros(8, 12)
SHAPES = [
    ("inner", linear(X, f32(7, 4)), ("linear", "(3, 5)", "5", "4")),
    ("weight of 3 dimensions", linear(X, f32(2, 7, 5)), ("weight has shape (2, 7, 5)", "(N, K) or (K,)")),
    ("weight of none", linear(X, f32()), ("weight has shape ()", "(N, K)")),
    ("x of none", linear(f32(), W), ("()", "at least one dimension")),
    ("bias", linear(X, W, f32(8)), ("bias has shape (8,)", "broadcasts to (3, 7)")),
    ("bias of higher rank", linear(X, W, f32(1, 3, 7)), ("bias has shape (1, 3, 7)", "(3, 7)")),
    ("bias would stretch the result", linear(f32(1, 5), W, f32(2, 7)), ("bias has shape (2, 7)", "(1, 7)")),
    ("residual", linear(X, W, residual=f32(7, 3)), ("residual has shape (7, 3)", "(3, 7)")),
    ("out", linear(X, W, out=f32(7, 3)), ("out", "(7, 3)", "(3, 7)")),
    ("addmm's a", addmm(BIAS, f32(2, 3, 5), f32(5, 7)), ("addmm: mat1 has shape (2, 3, 5)", "2 dimensions")),
    ("addmm's b", addmm(BIAS, X, f32(5)), ("mat2 has shape (5,)", "2 dimensions")),
    ("addmm's input", addmm(f32(8), X, f32(5, 7)), ("addmm: input has shape (8,)", "(3, 7)")),
    ("unread input", addmm(f32(8), X, f32(5, 7), beta=0), ("input has shape (8,)", "(3, 7)")),
    ("addmm's inner", addmm(BIAS, X, f32(4, 7)), ("(3, 5)", "(4, 7)")),
    ("baddbmm's a", baddbmm(BIAS, X, f32(2, 5, 7)), ("baddbmm: batch1 has shape (3, 5)", "3 dimensions")),
    ("baddbmm's batch", baddbmm(BIAS, f32(2, 3, 5), f32(1, 5, 7)), ("(2, 3, 5)", "(1, 5, 7)", "same batch")),
    ("scaled inner", scaled(A8, typed(FP8, 255, 7), ONE, ONE), ("(3, 256)", "(255, 7)", "256", "255")),
    ("scaled batch", scaled(typed(FP8, 2, 3, 4), B8, ONE, ONE), ("a has shape (2, 3, 4)", "2 dimensions")),
    ("scales of a", scaled(A8, B8, f32(3), ONE), ("scale_a has shape (3,)", "(3, 1)", "(3 or 1, 2)")),
    ("scales of b", scaled(A8, B8, ONE, f32(7, 1)), ("scale_b (7, 1)", "(1, 7)", "(2, 7 or 1)")),
    ("scales turned", scaled(A8, B8, f32(1, 3), f32(1, 7)), ("scale_a has shape (1, 3)",)),
    ("block scales of one", scaled(A8, B8, f32(3, 2), ONE), ("scale_a has shape (3, 2)", "both or neither")),
    ("block scales and rows", scaled(A8, B8, f32(3, 2), f32(1, 7)), ("(3, 2)", "(1, 7)", "both or neither")),
    ("too few blocks", scaled(A8, B8, f32(3, 1, 2), f32(2, 7)), ("(3, 1, 2)",)),
    ("block scales of int8", scaled(typed(INT8, 3, 256), typed(INT8, 256, 7), f32(3, 2), f32(2, 7)),
     ("(3, 2)", "one element, (3, 1)")),
    ("scaled bias", scaled(A8, B8, ONE, ONE, bias=f32(3)), ("bias has shape (3,)", "(3, 7)")),
    (
        "zero points of a",
        scaled(I8, J8, ONE, ONE, zero_a=typed(INT8, 3)),
        ("zero_a has shape (3,)", "(3, 1)"),
    ),
    (
        "zero points of b",
        scaled(I8, J8, ONE, ONE, zero_b=typed(INT8, 7, 1)),
        ("zero_b has shape (7, 1)", "(1, 7)"),
    ),
    ("weights", gated(X, W, f32(8, 5)), ("weight_gate has shape (7, 5)", "weight_up (8, 5)", "same shape")),
    ("rows of a weight", gated(X, f32(7, 4), W), ("input has shape (3, 5)", "weight_gate (7, 4)", "K is 5")),
    ("rows of the other", gated(X, W, f32(7, 4)), ("input has shape (3, 5)", "weight_up (7, 4)")),
    ("a vector as weight", gated(X, f32(5), W), ("weight_gate has shape (5,)", "(N, K)")),
    ("bias_gate", gated(X, W, W, bias_gate=f32(8)), ("bias_gate has shape (8,)", "(3, 7)")),
    ("bias_up", gated(X, W, W, bias_up=f32(3)), ("bias_up has shape (3,)", "(3, 7)")),
    ("gated out", gated(X, W, W, out=f32(7, 3)), ("(7, 3)", "(3, 7)")),
    ("scaled out", scaled(A8, B8, ONE, ONE, out=f32(3, 8).bfloat16()), ("(3, 8)", "(3, 7)")),
]  # fmt: skip
DTYPES = [
    ("mixed", linear(X, W.half()), ("float32", "float16", "same dtype")),
    ("whole numbers", linear(typed(INT8, 3, 5), typed(INT8, 7, 5)), ("int8", "floating")),
    ("complex activation", linear(X.cfloat(), W.cfloat(), activation="relu"), ("'relu' for complex64",)),
    ("gradient of a complex activation", linear(X.cfloat(), W.cfloat().requires_grad_(), activation="silu"),
     ("'silu' for complex64", "real")),
    ("addmm's activation", addmm(BIAS.cfloat(), X.cfloat(), S.cfloat(), activation="gelu"), ("'gelu' for",)),
    ("real bias of a complex product", linear(X.cfloat(), W.cfloat(), BIAS), ("float32", "wanted complex64")),
    ("complex input of a real product", addmm(BIAS.cfloat(), X, f32(5, 7)), ("complex64", "wanted float32")),
    ("complex out_dtype", linear(X.cfloat(), W.cfloat(), out_dtype=torch.complex128), ("complex128",)),
    ("gated complex", gated(X.cfloat(), W.cfloat(), W.cfloat()), ("input is complex64", "float32")),
    ("input is a list", linear([[1.0]], W), ("input is", "list", "torch.Tensor")),
    ("weight is None", linear(X, None), ("weight is", "NoneType", "torch.Tensor")),
    ("bias is a number", linear(X, W, 1.0), ("bias is", "float", "torch.Tensor")),
    ("residual is a list", linear(X, W, residual=[0]), ("residual is", "list", "torch.Tensor")),
    ("bias of whole numbers", linear(X, W, BIAS.int()), ("bias is int32", "float32")),
    ("bias of fp64", linear(X, W, BIAS.double()), ("bias is float64", "float32")),
    ("bias of fp32 for fp64", linear(X.double(), W.double(), BIAS), ("bias is float32", "wanted float64")),
    ("sparse bias", linear(X, W, BIAS.to_sparse()), ("bias is", "sparse", "dense")),
    ("out_dtype", linear(X, W, out_dtype=torch.int32), ("int32", "float16")),
    ("out", linear(X, W, out=OUT.double()), ("float64", "float32")),
    ("out of a dtype there is", linear(X, W, out=OUT.half()), ("out is float16", "or out_dtype")),
    ("addmm's out", addmm(BIAS, X, f32(5, 7), out=OUT.half()), ("out is float16", "or out_dtype")),
    ("scaled out of fp32", scaled(A8, B8, ONE, ONE, out=OUT), ("wanted bfloat16, or out_dtype",)),
    ("gated out of fp16", gated(X, W, W, out=OUT.half()), ("out is float16", "or out_dtype")),
    ("out against out_dtype", linear(X, W, out=OUT, out_dtype=torch.float16), ("float32", "float16")),
    ("out is a list", linear(X, W, out=[0]), ("out is", "list", "torch.Tensor")),
    ("input is None", addmm(None, X, f32(5, 7)), ("input is None", "torch.Tensor")),
    ("input is a number", addmm(1.0, X, f32(5, 7)), ("input is", "float", "torch.Tensor")),
    ("unread input", addmm(BIAS.int(), X, f32(5, 7), beta=0), ("input is int32", "float32")),
    ("addmm's mat1", addmm(BIAS, [1], f32(5, 7)), ("mat1 is", "list")),
    ("quantised a", scaled(f32(3, 256), f32(256, 7), ONE, ONE), ("a is float32", "float8_e4m3fn", "int8")),
    ("quantised mixture", scaled(A8, typed(INT8, 256, 7), ONE, ONE), ("float8_e4m3fn", "int8", "same dtype")),
    ("scale is a number", scaled(A8, B8, 1.0, ONE), ("scale_a is", "float", "torch.Tensor")),
    ("scale of fp16", scaled(A8, B8, ONE, ONE.half()), ("scale_b is float16", "wanted float32")),
    ("zero point of fp8", scaled(A8, B8, ONE, ONE, zero_a=typed(INT8)), ("zero_a", "float8_e4m3fn", "int8")),
    ("zero point of fp32", scaled(I8, J8, ONE, ONE, zero_b=ONE), ("zero_b is float32", "int32 or int8")),
    ("zero point is a number", scaled(I8, J8, ONE, ONE, zero_b=3), ("zero_b is", "int", "torch.Tensor")),
    ("gated whole numbers", gated(I8, J8.mT, J8.mT), ("input is int8", "bfloat16")),
    ("gated fp8", gated(A8, B8.mT, B8.mT), ("input is float8_e4m3fn", "bfloat16")),
    ("gated mixture", gated(X, W, W.half()), ("weight_gate is float32", "weight_up float16")),
    ("gated x", gated(X.half(), W, W), ("input is float16", "weight_gate float32", "same dtype")),
    ("gated None", gated(X, W, None), ("weight_up is", "NoneType")),
    ("gated bias", gated(X, W, W, bias_up=BIAS.double()), ("bias_up is float64", "float32")),
    ("scaled out_dtype", scaled(A8, B8, ONE, ONE, out_dtype=FP8), ("float8_e4m3fn", "bfloat16")),
    ("scaled int32", scaled(typed(INT8, 3, 4), typed(INT8, 4, 7), ONE, ONE, out_dtype=torch.int32),
     ("int32", "bfloat16")),
]  # fmt: skip
DEVICES = [
    ("bias", linear(X, W, META), ("bias", "meta")),
    ("residual", linear(X, W, residual=META), ("residual", "meta")),
    ("out", linear(X, W, out=torch.zeros(3, 7, device="meta")), ("out", "meta")),
    ("weight_up", gated(X, W, torch.zeros(7, 5, device="meta")), ("weight_up", "meta")),
    ("scale", scaled(A8, B8, ONE, torch.zeros((), device="meta")), ("scale_b", "meta")),
]
OVERLAPS = [
    ("out is mat1", addmm(f32(5), S, f32(5, 5), out=S), ("out overlaps mat1:",)),
    ("out is mat2", addmm(f32(5), f32(5, 5), S, out=S), ("out overlaps mat2:",)),
    ("out over half of bias", linear(X, W, BASE[0:3, 0:7], out=BASE[1:4, 0:7]), ("out overlaps bias",)),
    ("out is bias turned", linear(f32(7, 5), W, BASE[:7, :7], out=BASE[:7, :7].mT), ("out overlaps bias",)),
    ("out holds a row of bias", linear(X, W, BASE[0, :7], out=BASE[:3, :7]), ("out overlaps bias",)),
    ("out over residual", linear(X, W, residual=BASE[:3, 1:8], out=BASE[:3, :7]), ("overlaps residual",)),
    ("out over input", addmm(BASE[0, :7], X, f32(5, 7), out=BASE[:3, :7]), ("out overlaps input",)),
    ("out over a scale", scaled(A8, B8, BASE[0, 0], ONE, out=BASE[:3, :7], out_dtype=BASE.dtype),
     ("out overlaps scale_a",)),
    ("out over block scales",
     scaled(A8, B8, BASE[:3, :2], f32(2, 7), out=BASE[:3, 1:8], out_dtype=BASE.dtype),
     ("out overlaps scale_a",)),
    ("out over weight_up", gated(f32(7, 5), W, BASE[:7, :5], out=BASE[:7, 4:11]), ("overlaps weight_up",)),
    ("out over half of bias_up", gated(X, W, W, bias_up=BASE[:3, :7], out=BASE[:3, 1:8]),
     ("out overlaps bias_up", "exactly bias_up's")),
    ("out overlaps itself", linear(X, W, out=f32(1).expand(3, 7)), ("overlaps itself",)),
]  # fmt: skip
GRADIENTS = [
    ("input", linear(f32(3, 5).requires_grad_(), W, out=OUT), ("input requires", "no_grad", "detach")),
    ("weight", linear(X, f32(7, 5).requires_grad_(), out=OUT), ("weight requires", "no_grad")),
    ("bias", linear(X, W, f32(7).requires_grad_(), out=OUT), ("bias requires", "no_grad")),
    (
        "residual",
        linear(X, W, residual=f32(3, 7).requires_grad_(), out=OUT),
        ("residual requires", "no_grad"),
    ),
    ("out", linear(X, W, out=f32(3, 7).requires_grad_()), ("out requires", "no_grad")),
    ("input", addmm(f32(7).requires_grad_(), X, f32(5, 7), out=OUT), ("input requires", "no_grad")),
    ("scale", scaled(A8, B8, f32().requires_grad_(), ONE), ("scale_a requires", "no_grad")),
]
VALUES = [
    ("activation", linear(X, W, activation="tanh"), ("'tanh'", "relu", "silu")),
    ("activation of none", linear(X, W, activation=""), ("''", "relu")),
    ("activation as a function", linear(X, W, activation=torch.relu), ("activation is", "relu")),
    ("activation as a list", linear(X, W, activation=["relu"]), ("['relu']", "relu")),
    ("alpha", addmm(BIAS, X, f32(5, 7), alpha="1"), ("alpha is '1'", "a number")),
    ("beta", addmm(BIAS, X, f32(5, 7), beta=None), ("beta is None", "a number")),
    ("complex alpha", addmm(BIAS, X, f32(5, 7), alpha=1j), ("alpha is 1j", "a real number for float32")),
    ("complex beta", baddbmm(BIAS, f32(2, 3, 5), f32(2, 5, 7), beta=1 + 1e-9j), ("beta is", "a real number")),
    ("alpha as a bool", addmm(BIAS, X, f32(5, 7), alpha=True), ("alpha is True", "a number")),
    ("beta as a tensor", addmm(BIAS, X, f32(5, 7), beta=f32(1)), ("beta is", "a number")),
    ("precision", linear(X, W, precision="high"), ("'high'", "ieee", "tf32")),
    ("gated activation", gated(X, W, W, activation="swish"), ("'swish'", "silu")),
    ("gated precision", gated(X, W, W, precision="fp16x3"), ("'fp16x3'", "tf32x3")),
    ("precision of gated fp16", gated(X.half(), W.half(), W.half(), precision="tf32"), ("float16",)),
    ("precision of fp16", linear(X.half(), W.half(), precision="tf32"), ("float16", "float32")),
]
TABLES = {
    errors.ShapeError: SHAPES,
    errors.DtypeError: DTYPES,
    errors.DeviceError: DEVICES,
    errors.OverlapError: OVERLAPS,
    errors.GradientError: GRADIENTS,
    errors.InvalidValueError: VALUES,
}


@pytest.mark.parametrize(("kind", "call", "words"), cases(TABLES))
def test_wrong_calls(kind, call, words, launches):
    assert_refused(kind, call, words, launches)


RIGHT = [
    ("out is bias", linear(X, W, BASE[:3, :7], out=BASE[:3, :7])),
    ("out is residual", linear(X, W, residual=BASE[:3, :7], out=BASE[:3, :7])),
    ("out is input", addmm(OUT, X, f32(5, 7), out=OUT)),
    ("out beside bias", linear(X, f32(6, 5), BASE[:3, ::2], out=BASE[:3, 1::2])),
    ("out over an unread input", addmm(BASE[0, :7], X, f32(5, 7), beta=0, out=BASE[:3, :7])),
    ("bias of another dtype", linear(X.half(), W.half(), BIAS.bfloat16())),
    ("bias expanded", linear(X, W, f32(1).expand(3, 7))),
    ("out is bias_up", gated(X, W, W, bias_up=BASE[:3, :7], out=BASE[:3, :7])),
    ("halves of one weight", gated(X, BASE[:6, :5], BASE[:6, 5:10])),
    ("zero points", scaled(I8, J8, ONE, ONE, zero_a=typed(torch.int32, 1, 1), zero_b=typed(INT8, 1, 7))),
    ("weights of whole numbers", addmm(BIAS, X, f32(5, 7), alpha=2, beta=-1)),
    ("fp8 of two kinds", scaled(A8, typed(torch.float8_e5m2, 256, 7), ONE, f32(1))),
    ("block scales turned about", scaled(A8, B8, f32(2, 3).mT, f32(1, 2).mT)),
    ("whole numbers", scaled(typed(INT8, 3, 4), typed(INT8, 4, 7), f32(3, 1), f32(1, 7))),
]  # fmt: skip


@pytest.mark.parametrize("call", [call for _, call in RIGHT], ids=[label for label, _ in RIGHT])
@pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")
def test_unusual_but_right_calls_reach_the_kernel(call, launches):
    call()
    assert len(launches) == 1


def test_wrong_calls_leave_out_alone():
    out = torch.full((3, 7), 5.0)
    for bias in (f32(8), BIAS.double(), META):
        with pytest.raises(errors.TritileError):
            tritile.linear(X, W, bias, out=out)
    assert (out == 5.0).all()


PLAIN = MatmulProblem(1, 64, 48, 256, "float8_e4m3fn", "bfloat16")
FIELDS = [
    {"epilogue": "scale_a=column scale_b=row bias=row weighted gelu"},
    {"dtype": "bfloat16", "epilogue": "bias=row bias_up=full gated silu"},
    {"dtype": "int8", "epilogue": "scale_a=one scale_b=row zero_a=column zero_b=one"},
    {"b_dtype": "float8_e5m2"},
    *({"block_scales": name} for name in BLOCK_SCALES if name),
    {"epilogue": "residual=full silu", "b_dtype": "float8_e5m2", "block_scales": "1x128"},
]


@pytest.mark.parametrize("changes", FIELDS, ids=str)
def test_problems_are_read_back_as_they_are_written(changes):
    problem = replace(PLAIN, **changes)
    assert problem_from_dict(problem_to_dict(problem)) == problem
    assert problem_key(problem) != problem_key(PLAIN)
    assert problem.kind != PLAIN.kind
    assert set(problem_to_dict(problem)) - set(problem_to_dict(PLAIN)) == set(changes) - {"dtype"}
    for text in changes.values():
        for word in text.split():
            assert word in problem.label


def test_problems_of_before_there_were_epilogues_are_read_on():
    old = {
        "op": "matmul", "batch": 1, "m": 64, "n": 48, "k": 256, "dtype": "float8_e4m3fn",
        "out_dtype": "bfloat16", "a_layout": "row", "b_layout": "row", "out_layout": "row",
        "a_align": 16, "b_align": 16, "out_align": 16, "precision": "ieee",
    }  # fmt: skip
    assert problem_from_dict(old) == PLAIN
    assert problem_to_dict(PLAIN) == old


@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue": "gelu bias=row"},
        {"epilogue": "bias=diagonal"},
        {"epilogue": "tanh"},
        {"epilogue": "bias=row bias=row"},
        {"epilogue": " "},
        {"b_dtype": "float8_e4m3fn"},
        {"b_dtype": "int8"},
        {"block_scales": "1x64"},
        {"epilogue": "gated silu"},
        {"epilogue": "gated silu", "dtype": "float32", "precision": "fp16x3"},
        {"epilogue": "gated silu", "dtype": "float32", "block_scales": "1x128"},
        {"epilogue": "bias_up=row silu", "dtype": "float16"},
        {"epilogue": "silu gated", "dtype": "float16"},
        {"epilogue": "zero_a=one"},
        {"epilogue": "zero_a=row", "dtype": "int8"},
        {"epilogue": "zero_b=column", "dtype": "int8"},
        {"epilogue": "zero_b=one", "dtype": "int8", "batch": 2},
        {"block_scales": "1x128", "batch": 2},
        {"block_scales": "1x128", "dtype": "int8"},
    ],
    ids=str,
)
def test_problems_that_cannot_be(changes):
    with pytest.raises(errors.InvalidValueError):
        replace(PLAIN, **changes)


def test_epilogues_are_read_back_as_they_are_written():
    spreads, sides = ("", "one", "row", "column", "full"), ("scale_a", "scale_b", "bias", "residual")
    for *given, activation, weighted in itertools.product(
        spreads, spreads, spreads, spreads, ("", "relu", "gelu", "gelu_tanh", "silu"), ("", "weighted")
    ):
        words = [f"{side}={spread}" for side, spread in zip(sides, given, strict=True) if spread]
        text = " ".join([*words, *filter(None, (weighted, activation))])
        epilogue = epilogue_of(text)
        assert str(epilogue) == text
        assert epilogue.transposed.transposed == epilogue
        assert (epilogue.constants is None) == (text == "")
