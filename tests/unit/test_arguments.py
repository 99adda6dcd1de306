"""Wrong calls: each raises its own error, which says what came and what is wanted, before any launch."""

import functools

import numpy as np
import pytest
import torch

import tritile
from tests.packed import weight_of
from tests.wrong_calls import assert_refused, cases, recorded
from tritile import errors
from tritile.ops import checks

FLOAT, FP8, INT8 = torch.float32, torch.float8_e4m3fn, torch.int8


def f32(*shape):
    return torch.zeros(shape)


def typed(dtype, *shape):
    return torch.zeros(shape or (3, 3), dtype=dtype)


def later(function):
    """A function that returns its call, to be made later."""
    return lambda *args, **kwargs: functools.partial(function, *args, **kwargs)


matmul, transpose, permute = map(later, (tritile.matmul, tritile.transpose, tritile.permute))
linear, addmm, baddbmm, scaled, gated = map(
    later, (tritile.linear, tritile.addmm, tritile.baddbmm, tritile.scaled_matmul, tritile.gated_linear)
)


class Mine(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Every launch is recorded, and none happens."""
    return recorded(monkeypatch)


def overlapping(*shape):
    return torch.zeros(1).expand(shape)


BASE = torch.zeros(6, 12)
SQUARE, CUBE = torch.zeros(6, 6), torch.zeros(4, 4, 4)
A, B = f32(3, 5), f32(5, 7)
X, W, BIAS, OUT, S = f32(3, 5), f32(7, 5), f32(7), f32(3, 7), f32(5, 5)
A8, B8, ONE = typed(FP8, 3, 256), typed(FP8, 256, 7), f32()
META7 = torch.zeros(7, device="meta")
BOARD = torch.zeros(8, 12)
SHAPES = [
    ("inner", matmul(f32(3, 5), f32(4, 7)), ("(3, 5)", "(4, 7)", "5", "4")),
    ("batch", matmul(f32(2, 3, 5), f32(3, 5, 7)), ("(2, 3, 5)", "(3, 5, 7)", "broadcast")),
    ("0-d a", matmul(f32(), f32(5, 7)), ("()", "(5, 7)", "at least one dimension")),
    ("out", matmul(A, B, out=f32(3, 8)), ("(3, 8)", "(3, 7)")),
    ("dim0 too large", transpose(f32(2, 3), 2, 0), ("dim0", "2", "-2 to 1")),
    ("dim as text", transpose(f32(2, 3), "0", 1), ("dim0", "'0'", "an integer")),
    ("dim as bool", transpose(f32(2, 3), True, 0), ("dim0", "True", "an integer")),
    ("dims too few", permute(f32(2, 3), (1,)), ("(1,)", "each of the 2 dimensions once")),
    ("dims twice", permute(f32(2, 3), (1, -1)), ("(1, -1)", "each of the 2 dimensions once")),
    ("dims too large", permute(f32(2, 3), (0, 2)), ("dims[1] is 2", "-2 to 1")),
    ("dims as text", permute(f32(2, 3), "10"), ("'10'", "a list or tuple of 2 dimensions")),
    ("permuted out", permute(f32(2, 3), (1, 0), out=f32(2, 3)), ("(2, 3)", "(3, 2)")),
    ("inner", linear(X, f32(7, 4)), ("linear", "(3, 5)", "5", "4")),
    ("weight of 3 dimensions", linear(X, f32(2, 7, 5)), ("weight has shape (2, 7, 5)", "(N, K) or (K,)")),
    ("bias", linear(X, W, f32(8)), ("bias has shape (8,)", "broadcasts to (3, 7)")),
    ("residual", linear(X, W, residual=f32(7, 3)), ("residual has shape (7, 3)", "(3, 7)")),
    ("bias would stretch the result", linear(f32(1, 5), W, f32(2, 7)), ("bias has shape (2, 7)", "(1, 7)")),
    ("addmm's a", addmm(BIAS, f32(2, 3, 5), f32(5, 7)), ("addmm: mat1 has shape (2, 3, 5)", "2 dimensions")),
    ("addmm's input", addmm(f32(8), X, f32(5, 7)), ("addmm: input has shape (8,)", "(3, 7)")),
    ("unread input", addmm(f32(8), X, f32(5, 7), beta=0), ("input has shape (8,)", "(3, 7)")),
    ("baddbmm's a", baddbmm(BIAS, X, f32(2, 5, 7)), ("baddbmm: batch1 has shape (3, 5)", "3 dimensions")),
    ("baddbmm's batch", baddbmm(BIAS, f32(2, 3, 5), f32(1, 5, 7)), ("(2, 3, 5)", "(1, 5, 7)", "same batch")),
    ("scaled inner", scaled(A8, typed(FP8, 255, 7), ONE, ONE), ("(3, 256)", "(255, 7)", "256", "255")),
    ("scaled batch", scaled(typed(FP8, 2, 3, 4), B8, ONE, ONE), ("a has shape (2, 3, 4)", "2 dimensions")),
    ("scales of a", scaled(A8, B8, f32(3), ONE), ("scale_a has shape (3,)", "(3, 1)", "(3 or 1, 2)")),
    ("scales of b", scaled(A8, B8, ONE, f32(7, 1)), ("scale_b (7, 1)", "(1, 7)", "(2, 7 or 1)")),
    ("block scales of one", scaled(A8, B8, f32(3, 2), ONE), ("scale_a has shape (3, 2)", "both or neither")),
    ("block scales and rows", scaled(A8, B8, f32(3, 2), f32(1, 7)), ("(3, 2)", "(1, 7)", "both or neither")),
    ("block scales of int8", scaled(typed(INT8, 3, 256), typed(INT8, 256, 7), f32(3, 2), f32(2, 7)),
     ("(3, 2)", "one element, (3, 1)")),
    ("weights", gated(X, W, f32(8, 5)), ("weight_gate has shape (7, 5)", "weight_up (8, 5)", "same shape")),
    ("rows of a weight", gated(X, f32(7, 4), W), ("input has shape (3, 5)", "weight_gate (7, 4)", "K is 5")),
    ("a vector as weight", gated(X, f32(5), W), ("weight_gate has shape (5,)", "(N, K)")),
]  # fmt: skip


C64, C128, E5 = map(typed, (torch.complex64, torch.complex128, torch.float8_e5m2))
DTYPES = [
    ("mixed", matmul(typed(torch.float16), typed(torch.float32)), ("float16", "float32", "same dtype")),
    ("complex half", matmul(typed(torch.complex32), typed(torch.complex32)),
     ("complex32", "complex64", "int8")),
    ("complex and real", matmul(C64, typed(FLOAT)), ("complex64", "float32", "same dtype")),
    ("real out_dtype", matmul(C64, C64, out_dtype=FLOAT), ("complex64", "float32")),
    ("real out", matmul(C64, C64, out=typed(FLOAT)), ("out", "float32")),
    ("conjugated out of matmul", matmul(C64, C64, out=C64.conj()), ("out", "conjugated")),
    ("int32", matmul(typed(torch.int32), typed(torch.int32)), ("int32", "float16")),
    ("input is a list", matmul([[1.0]], B), ("input is", "list", "torch.Tensor")),
    ("other is None", matmul(A, None), ("other is", "NoneType", "torch.Tensor")),
    ("out is a list", matmul(A, B, out=[0]), ("out is", "list", "torch.Tensor")),
    ("sparse COO", matmul(A, B.to_sparse()), ("other is", "sparse_coo", "dense")),
    ("fp32 out_dtype", matmul(A, B, out_dtype=torch.float64), ("float32", "float64", "bfloat16")),
    ("fp64 out_dtype", matmul(A.double(), B.double(), out_dtype=FLOAT), ("float64", "float32")),
    ("out_dtype as text", matmul(A, B, out_dtype="float16"), ("float16", "float32")),
    ("out of a dtype there is", matmul(A, B, out=f32(3, 7).half()), ("out is float16", "another out_dtype")),
    ("out of fp8", matmul(*[E5] * 2, out=typed(FLOAT)),
     ("expected bfloat16, or another out_dtype",), ),
    ("out against out_dtype", matmul(A, B, out=f32(3, 7), out_dtype=torch.float16), ("float32", "float16")),
    ("transpose nested", transpose(torch.nested.nested_tensor([f32(2, 3)])), ("input is", "nested", "dense")),
    ("nested beside a subclass", matmul(torch.ones(2, 3, 4).as_subclass(Mine),
     torch.nested.nested_tensor([torch.ones(3, 4)])), ("nested",)),
    ("nested out", transpose(typed(FLOAT), out=torch.nested.nested_tensor([f32(2, 3)])),
     ("out is", "nested")),
    ("conjugated out", transpose(C64, out=C64.conj()), ("out", "conj")),
    ("mixed", linear(X, W.half()), ("float32", "float16", "same dtype")),
    ("whole numbers", linear(typed(INT8, 3, 5), typed(INT8, 7, 5)), ("int8", "floating")),
    ("complex activation", linear(X.cfloat(), W.cfloat(), activation="relu"), ("'relu' for complex64",)),
    ("gradient of a complex activation", linear(X.cfloat(), W.cfloat().requires_grad_(), activation="silu"),
     ("'silu' for complex64", "real")),
    ("addmm's activation", addmm(BIAS.cfloat(), X.cfloat(), S.cfloat(), activation="gelu"), ("'gelu' for",)),
    ("real bias of a complex product", linear(X.cfloat(), W.cfloat(), BIAS),
     ("float32", "expected complex64")),
    ("complex input of a real product", addmm(BIAS.cfloat(), X, f32(5, 7)),
     ("complex64", "expected float32")),
    ("gated complex", gated(X.cfloat(), W.cfloat(), W.cfloat()), ("input is complex64", "float32")),
    ("weight is None", linear(X, None), ("weight is", "NoneType", "torch.Tensor")),
    ("bias is a number", linear(X, W, 1.0), ("bias is", "float", "torch.Tensor")),
    ("bias of whole numbers", linear(X, W, BIAS.int()), ("bias is int32", "float32")),
    ("bias of fp32 for fp64", linear(X.double(), W.double(), BIAS), ("bias is float32", "expected float64")),
    ("scaled out of fp32", scaled(A8, B8, ONE, ONE, out=OUT), ("expected bfloat16, or another out_dtype",)),
    ("input is None", addmm(None, X, f32(5, 7)), ("input is None", "torch.Tensor")),
    ("unread input", addmm(BIAS.int(), X, f32(5, 7), beta=0), ("input is int32", "float32")),
    ("addmm's mat1", addmm(BIAS, [1], f32(5, 7)), ("mat1 is", "list")),
    ("quantised a", scaled(f32(3, 256), f32(256, 7), ONE, ONE), ("a is float32", "float8_e4m3fn", "int8")),
    ("scale is a number", scaled(A8, B8, 1.0, ONE), ("scale_a is", "float", "torch.Tensor")),
    ("scale of fp16", scaled(A8, B8, ONE, ONE.half()), ("scale_b is float16", "expected float32")),
    ("gated fp8", gated(A8, B8.mT, B8.mT), ("input is float8_e4m3fn", "bfloat16")),
    ("gated mixture", gated(X, W, W.half()), ("weight_up float16", "expected the same dtype")),
    ("gated x", gated(X.half(), W, W), ("input is float16", "weight_gate float32", "same dtype")),
    ("scaled out_dtype", scaled(A8, B8, ONE, ONE, out_dtype=FP8), ("float8_e4m3fn", "bfloat16")),
]  # fmt: skip

META = torch.zeros(5, 7, device="meta")
DEVICES = [
    ("b on meta", matmul(A, META), ("meta", "cpu")),
    ("out on meta", matmul(A, B, out=torch.zeros(3, 7, device="meta")), ("out", "meta", "cpu")),
    ("transposed out on meta", transpose(A, out=torch.zeros(5, 3, device="meta")), ("out", "meta", "cpu")),
    ("bias", linear(X, W, META7), ("bias", "meta")),
    ("weight_up", gated(X, W, torch.zeros(7, 5, device="meta")), ("weight_up", "meta")),
    ("scale", scaled(A8, B8, ONE, torch.zeros((), device="meta")), ("scale_b", "meta")),
]  # fmt: skip
OVERLAPS = [
    ("out expanded", matmul(A, B, out=overlapping(3, 7)), ("(3, 7)", "(0, 0)", "overlaps itself")),
    ("out windows", matmul(A, B, out=torch.zeros(30).as_strided((3, 7), (2, 1))), ("(2, 1)", "itself")),
    ("out is a", matmul(SQUARE, BASE[:, :6].clone(), out=SQUARE), ("out overlaps input:",)),
    ("out is b", matmul(BASE[:, :6].clone(), SQUARE, out=SQUARE), ("out overlaps other:",)),
    ("out is b turned", matmul(BASE[:, :6].clone(), SQUARE, out=SQUARE.mT), ("out overlaps other:",)),
    ("one element shared", matmul(BASE.view(-1)[:30].view(5, 6), SQUARE, out=BASE.view(-1)[29:59].view(5, 6)),
     ("out overlaps input:",)),
    ("transpose in a part", transpose(SQUARE[:4, :4], out=SQUARE[1:5, :4]), ("out overlaps input:",)),
    ("reversal in place", permute(CUBE, (2, 1, 0), out=CUBE.permute(2, 1, 0)), ("out overlaps input:",)),
    ("rotation in place", permute(CUBE, (1, 2, 0), out=CUBE), ("out overlaps input:",)),
    ("transposed out expanded", transpose(A, out=overlapping(5, 3)), ("(5, 3)", "overlaps itself")),
    ("out is mat1", addmm(f32(5), S, f32(5, 5), out=S), ("out overlaps mat1:",)),
    ("out over half of bias", linear(X, W, BOARD[0:3, 0:7], out=BOARD[1:4, 0:7]), ("out overlaps bias",)),
    ("out is bias turned", linear(f32(7, 5), W, BOARD[:7, :7], out=BOARD[:7, :7].mT), ("out overlaps bias",)),
    ("out over residual", linear(X, W, residual=BOARD[:3, 1:8], out=BOARD[:3, :7]), ("overlaps residual",)),
    ("out over input", addmm(BOARD[0, :7], X, f32(5, 7), out=BOARD[:3, :7]), ("out overlaps input",)),
    ("out over a scale", scaled(A8, B8, BOARD[0, 0], ONE, out=BOARD[:3, :7], out_dtype=BOARD.dtype),
     ("out overlaps scale_a",)),
    ("out over block scales",
     scaled(A8, B8, BOARD[:3, :2], f32(2, 7), out=BOARD[:3, 1:8], out_dtype=BOARD.dtype),
     ("out overlaps scale_a",)),
    ("out over weight_up", gated(f32(7, 5), W, BOARD[:7, :5], out=BOARD[:7, 4:11]), ("overlaps weight_up",)),
    ("out over half of bias_up", gated(X, W, W, bias_up=BOARD[:3, :7], out=BOARD[:3, 1:8]),
     ("out overlaps bias_up", "exactly that of bias_up")),
]  # fmt: skip
GRADIENTS = [
    ("a", matmul(f32(3, 5).requires_grad_(), B, out=f32(3, 7)), ("input requires", "no_grad", "detach")),
    ("b", matmul(A, f32(5, 7).requires_grad_(), out=f32(3, 7)), ("other requires", "no_grad", "detach")),
    ("fp8", matmul(E5.clone().requires_grad_(), E5), ("input requires", "no_grad")),
    ("out", matmul(A, B, out=f32(3, 7).requires_grad_()), ("out requires", "no_grad")),
    ("x", transpose(f32(3, 5).requires_grad_(), out=f32(5, 3)), ("input requires", "no_grad", "detach")),
    ("transposed out", transpose(A, out=f32(5, 3).requires_grad_()), ("out requires", "no_grad")),
    ("input", addmm(f32(7).requires_grad_(), X, f32(5, 7), out=OUT), ("input requires", "no_grad")),
    ("scale", scaled(A8, B8, f32().requires_grad_(), ONE), ("scale_a requires", "no_grad")),
]  # fmt: skip
VALUES = [
    ("precision", matmul(A, B, precision="high"), ("'high'", "ieee", "fp16x3", "tf32")),
    ("precision of torch", matmul(A, B, precision=torch.float32), ("float32", "ieee")),
    ("precision of complex64", matmul(C64, C64, precision="tf32"), ("'tf32'", "expected None", "complex64")),
    ("precision of complex128", matmul(C128, C128, precision="ieee"), ("expected None", "complex128")),
    ("precision of fp64", matmul(A.double(), B.double(), precision="tf32"), ("'tf32'", "ieee", "float64")),
    ("precision of fp16", matmul(A.half(), B.half(), precision="tf32"), ("float16", "float32")),
    ("activation", linear(X, W, activation="tanh"), ("'tanh'", "relu", "silu")),
    ("activation as a function", linear(X, W, activation=torch.relu), ("activation is", "relu")),
    ("alpha", addmm(BIAS, X, f32(5, 7), alpha="1"), ("alpha is '1'", "a number")),
    ("beta", addmm(BIAS, X, f32(5, 7), beta=None), ("beta is None", "a number")),
    ("complex alpha", addmm(BIAS, X, f32(5, 7), alpha=1j), ("alpha is 1j", "a real number for float32")),
    ("complex beta", baddbmm(BIAS, f32(2, 3, 5), f32(2, 5, 7), beta=1 + 1e-9j), ("beta is", "a real number")),
    ("alpha as a bool", addmm(BIAS, X, f32(5, 7), alpha=True), ("alpha is True", "a number")),
    ("gated activation", gated(X, W, W, activation="swish"), ("'swish'", "silu")),
    ("gated precision", gated(X, W, W, precision="fp16x3"), ("'fp16x3'", "ieee, tf32")),
]  # fmt: skip
B8S = {2: B.expand(2, 5, 7), 1: A.expand(2, 3, 5)}
mm, bmm = later(tritile.mm), later(tritile.bmm)
SHAPES += [
    ("mm by vector", mm(A, B[:, 0]), ("mm: mat2 has shape (5,)", "2 dimensions")),
    ("mm of batches", mm(B8S[1], B8S[2]), ("mm: input has shape (2, 3, 5)", "2 dimensions")),
    ("bmm of matrices", bmm(A, B), ("bmm: input has shape (3, 5)", "3 dimensions")),
    ("bmm inner", bmm(B8S[1], B8S[1]), ("(2, 3, 5) and mat2 (2, 3, 5)", "(B, M, K)")),
]
XP, PACKED = torch.ones(2, 96, dtype=torch.bfloat16), weight_of(40, 96, torch.bfloat16, 4, 64)
PARTS = PACKED.packed, PACKED.scales.clone().requires_grad_(), PACKED.zeros
KIND = {"bits": 4, "group_size": 64, "n": 40, "k": 96}
SHAPES += [
    (
        "packed inner",
        linear(XP[:, :95], PACKED),
        ("input has shape (2, 95) and ", "expected input (..., 96)"),
    ),
    ("packed 0-d", linear(XP[0, 0], PACKED), ("input has shape ()",)),
    ("packed bias", linear(XP, PACKED, f32(39)), ("bias has shape (39,): expected (40,)",)),
]
DTYPES += [
    ("mm by a list", mm(A, [1.0]), ("mm: mat2 is list",)),
    ("packed for another", linear(XP.half(), PACKED), ("input is float16, but weight is quantized for bfl",)),
    ("words for a weight", linear(XP, PACKED.packed[:, :96]), ("int32",)),
    ("packed bias", linear(XP, PACKED, f32(40).double()), ("bias is float64", "float32, float16, bfloat16")),
]
DEVICES += [("packed", linear(XP, PACKED.to("meta")), ("weight is on meta: expected cpu",))]
GRADIENTS += [("packed", later(torch.ops.tritile.linear_quantized)(XP, *PARTS, **KIND), ("weight.scales",))]
UNSUPPORTED = [
    ("packed epilogue", linear(XP, PACKED, activation="relu", residual=XP),
     ("takes only bias, not activation, residual",)),
]  # fmt: skip
groups, quantize = later(tritile.grouped_matmul), later(tritile.quantize)
A12, B3 = f32(12, 8), f32(3, 8, 5)
OFFS = torch.tensor([4, 4, 12], dtype=torch.int32)
OF_FP8 = functools.partial(groups, A12.to(FP8), B3.to(FP8), OFFS)
ROWS, COLUMNS = torch.ones(12), torch.ones(3, 5)
HALVES = torch.ones(4, 8, dtype=torch.bfloat16)
SHAPES += [
    ("groups of a vector", groups(A12[0], B3, OFFS), ("two or three dimensions",)),
    ("groups' K", groups(A12, f32(3, 7, 5), OFFS), ("K is 8 in a and 7 in b",)),
    ("no offs", groups(A12, B3), ("offs is None: expected the end",)),
    ("offs of none", groups(B3, B3.mT.contiguous(), OFFS), ("expected None, as a and b",)),
    ("offs of another number", groups(A12, B3, OFFS[:2]), ("(2,): expected (3,)",)),
    ("offs in a table", groups(A12, B3, OFFS[None]), ("(1, 3)",)),
    ("offs apart", groups(A12, B3, torch.zeros(6, dtype=torch.int32)[::2]), ("contiguous elements",)),
    ("other batches", groups(B3, f32(2, 5, 4)), ("a has 3 groups and b 2",)),
    ("one scale", OF_FP8(scale_a=ROWS), ("or neither",)),
    ("short scales", OF_FP8(scale_a=ROWS[1:], scale_b=COLUMNS), ("expected (12,)",)),
    ("long scales", OF_FP8(scale_a=ROWS, scale_b=torch.ones(3, 6)), ("expected (3, 5)",)),
    ("scales in rows", OF_FP8(scale_a=ROWS, scale_b=torch.ones(5, 3).T), ("contiguous",)),
    ("quantized vector", quantize(HALVES[0], bits=4), ("weight has shape (8,): expected (N, K)",)),
    ("quantized nothing", quantize(HALVES[:0], bits=4), ("(0, 8): expected (N, K), both 1 or more",)),
]
DTYPES += [
    ("groups mixed", groups(A12, B3.half(), OFFS), ("expected the same dtype",)),
    ("groups of float64", groups(A12.double(), B3.double(), OFFS), ("a is float64: expected one of",)),
    ("long offs", groups(A12, B3, OFFS.long()), ("offs is int64", ": expected int32")),
    ("scales of floats", groups(A12, B3, OFFS, scale_a=ROWS, scale_b=COLUMNS), ("scale_a is for fp8",)),
    ("half scales", OF_FP8(scale_a=ROWS.half(), scale_b=COLUMNS), ("expected float32",)),
    ("groups' out_dtype", groups(A12, B3, OFFS, out_dtype=torch.int32), ("out_dtype",)),
    ("groups' out", groups(A12, B3, OFFS, out=A12[:, :5].half()), ("out is float16", "another out_dtype")),
    ("quantized number", quantize(5, bits=4), ("weight is int '5': expected a torch.Tensor",)),
    ("quantized fp64", quantize(HALVES.double(), bits=4), ("float64: expected bfloat16, float16, float32",)),
    ("scales to quantize by", quantize(HALVES, bits=4, dtype=FLOAT), ("float32: expected torch.bfloat16",)),
]
DEVICES += [("offs elsewhere", groups(A12, B3, OFFS.to("meta")), ("meta",))]
OVERLAPS += [("out in a", groups(A12, B3, OFFS, out=A12[:, :5]), ("out overlaps a",))]
GRADIENTS += [
    ("groups", groups(A12.clone().requires_grad_(), B3, OFFS, out=f32(12, 5)), ("a requires",)),
    ("groups of fp8", groups(A12.to(FP8).requires_grad_(), B3.to(FP8), OFFS), ("a requires",)),
    ("quantized", quantize(HALVES.clone().requires_grad_(), bits=4), ("weight requires a gradient",)),
]
VALUES += [
    ("precision of halves", groups(A12.half(), B3.half(), OFFS, precision="tf32"), ("precision",)),
    ("lowered precision", groups(A12, B3, OFFS, precision="fp16x3"), ("ieee, tf32",)),
    ("three bits", quantize(HALVES, bits=3), ("bits is 3: expected one of (4, 8)",)),
    ("bits as a float", quantize(HALVES, bits=4.0), ("bits is 4.0: expected one of (4, 8)",)),
    ("group_size", quantize(HALVES, bits=4, group_size=48), ("group_size is 48: expected one of",)),
    ("zero_points", quantize(HALVES, bits=4, zero_points=1), ("zero_points is 1: expected True or False",)),
    ("overflow", quantize(HALVES.float() * 1e38, bits=4, dtype=torch.float16), ("overflow float16",)),
]
UNSUPPORTED += [
    ("too many groups", groups(A12.T, A12, torch.zeros(1025, dtype=torch.int32)), ("1025 groups",))
]
TABLES = {
    errors.UnsupportedError: UNSUPPORTED,
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


def test_undecidable_memory_counts_as_shared():
    memory = torch.zeros(40937 + 512)
    a = memory.as_strided((2, 2, 6, 8, 5), (2944, 2803, 2991, 178, 534))
    b = memory.as_strided((5, 4, 6, 2, 7), (577, 1246, 712, 2140, 851), 379)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(a.numpy(), b.numpy(), checks._MAX_OVERLAP_WORK)
    assert checks.overlap(a, b)


def test_errors_are_python_errors_too():
    builtins = {
        ValueError: [errors.ShapeError, errors.DeviceError, errors.OverlapError, errors.InvalidValueError],
        TypeError: [errors.DtypeError],
        RuntimeError: [errors.GradientError, errors.UnsupportedError],
        LookupError: [errors.NotTunedError, errors.NotCompiledError],
    }
    for builtin, kinds in builtins.items():
        assert all(issubclass(kind, builtin) and issubclass(kind, tritile.TritileError) for kind in kinds)


RIGHT = [
    ("fp8 of two kinds", matmul(typed(torch.float8_e4m3fn), E5)),
    ("columns of one buffer", matmul(BASE[:, :6], SQUARE, out=BASE[:, 6:])),
    ("every second column", matmul(BASE[:, ::2], SQUARE, out=BASE[:, 1::2])),
    ("every second row", matmul(BASE[::2, :6], SQUARE, out=BASE[1::2, :6])),
    ("halves of one row", matmul(BASE[0, :6], SQUARE, out=BASE[0, 6:])),
    ("interleaved transpose", transpose(BASE[:, ::2], out=BASE[:, 1::2])),
    ("out with a stride for a size of 1", matmul(A, f32(5, 1), out=f32(3, 9)[:, :1])),
    ("out along columns", matmul(A, B, out=f32(7, 3).mT)),
    ("out with gaps in a batch", matmul(f32(4, 3, 5), B, out=f32(4, 9, 7)[:, ::3])),
    ("inputs that overlap themselves", matmul(overlapping(3, 5), overlapping(5, 7))),
    ("inputs that are one", matmul(SQUARE, SQUARE)),
    ("out is bias", linear(X, W, BOARD[:3, :7], out=BOARD[:3, :7])),
    ("out is residual", linear(X, W, residual=BOARD[:3, :7], out=BOARD[:3, :7])),
    ("out is input", addmm(OUT, X, f32(5, 7), out=OUT)),
    ("out beside bias", linear(X, f32(6, 5), BOARD[:3, ::2], out=BOARD[:3, 1::2])),
    ("out over an unread input", addmm(BOARD[0, :7], X, f32(5, 7), beta=0, out=BOARD[:3, :7])),
    ("bias of another dtype", linear(X.half(), W.half(), BIAS.bfloat16())),
    ("bias expanded", linear(X, W, f32(1).expand(3, 7))),
    ("out is bias_up", gated(X, W, W, bias_up=BOARD[:3, :7], out=BOARD[:3, :7])),
    ("halves of one weight", gated(X, BOARD[:6, :5], BOARD[:6, 5:10])),
    ("weights of whole numbers", addmm(BIAS, X, f32(5, 7), alpha=2, beta=-1)),
    ("fp8 of two kinds", scaled(A8, typed(torch.float8_e5m2, 256, 7), ONE, f32(1))),
    ("whole numbers", scaled(typed(INT8, 3, 4), typed(INT8, 4, 7), f32(3, 1), f32(1, 7))),
]  # fmt: skip


@pytest.mark.parametrize("call", [call for _, call in RIGHT], ids=[label for label, _ in RIGHT])
def test_unusual_calls_reach_the_kernel(call, launches):
    call()
    assert len(launches) == 1


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_where_none_recorded(guard, launches):
    weight, x = f32(5, 7).requires_grad_(), f32(3, 5).requires_grad_()
    with guard():
        tritile.matmul(x, weight)
        tritile.matmul(x, weight, out=f32(3, 7))
        tritile.transpose(weight)
    tritile.matmul(x.detach(), weight.detach())
    assert len(launches) == 4


@pytest.mark.parametrize("call", [tritile.matmul, tritile.linear])
def test_nothing_for_a_tensor_under_autocast(call):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(errors.DtypeError, match="expected a"):
        call(torch.ones(3, 4), None)


@pytest.mark.parametrize("kind", [torch.Tensor, Mine])
def test_inference_out_refused_before_write(kind, launches):
    with torch.inference_mode():
        out = torch.full((3, 3), 7.0)
    a, b = torch.ones(3, 3).as_subclass(kind), torch.ones(3, 3)
    groups = torch.ones(1, 3, 3).as_subclass(kind)
    calls = [
        lambda: tritile.matmul(a, b, out=out),
        lambda: tritile.transpose(a, 0, 1, out=out),
        lambda: tritile.linear(a, b, out=out),
        lambda: tritile.addmm(a, b, b, out=out),
        lambda: tritile.gated_linear(a, b, b, out=out),
        lambda: tritile.grouped_matmul(groups, groups, out=out[None]),
    ]
    for call in calls:
        with pytest.raises(errors.GradientError, match=r"inside torch\.inference_mode"):
            call()
        assert bool((out == 7).all())
        assert launches == []
