"""Wrong calls: each raises its own error, which says what came and what is wanted, before any launch."""

import numpy as np
import pytest
import torch

import tritile
from tests.wrong_calls import assert_refused, cases, recorded
from tritile import errors
from tritile.core import settings
from tritile.core.settings import cache_dir, tune_budget_s
from tritile.ops import checks

FLOAT = torch.float32


def f32(*shape):
    return torch.zeros(shape)


def matmul(*args, **kwargs):
    return lambda: tritile.matmul(*args, **kwargs)


def transpose(*args, **kwargs):
    return lambda: tritile.transpose(*args, **kwargs)


def permute(*args, **kwargs):
    return lambda: tritile.permute(*args, **kwargs)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Every launch is recorded, and none happens."""
    return recorded(monkeypatch)


def overlapping(*shape):
    return torch.zeros(1).expand(shape)


BASE = torch.zeros(6, 12)
SQUARE, CUBE = torch.zeros(6, 6), torch.zeros(4, 4, 4)
A, B = f32(3, 5), f32(5, 7)
SHAPES = [
    ("inner", matmul(f32(3, 5), f32(4, 7)), ("(3, 5)", "(4, 7)", "5", "4")),
    ("inner of vectors", matmul(f32(5), f32(6)), ("(5,)", "(6,)")),
    ("vector by matrix", matmul(f32(5), f32(6, 2)), ("(5,)", "(6, 2)")),
    ("matrix by vector", matmul(f32(2, 5), f32(6)), ("(2, 5)", "(6,)")),
    ("batch", matmul(f32(2, 3, 5), f32(3, 5, 7)), ("(2, 3, 5)", "(3, 5, 7)", "broadcast")),
    ("deep batch", matmul(f32(2, 4, 3, 5), f32(3, 1, 5, 7)), ("(2, 4, 3, 5)", "(3, 1, 5, 7)", "broadcast")),
    ("empty batch", matmul(f32(0, 3, 5), f32(2, 5, 7)), ("(0, 3, 5)", "broadcast")),
    ("0-d a", matmul(f32(), f32(5, 7)), ("()", "(5, 7)", "at least one dimension")),
    ("0-d b", matmul(f32(3, 5), f32()), ("()", "(3, 5)", "at least one dimension")),
    ("0-d both", matmul(f32(), f32()), ("()", "at least one dimension")),
    ("K = 0 against 1", matmul(f32(3, 0), f32(1, 7)), ("(3, 0)", "(1, 7)")),
    ("out", matmul(A, B, out=f32(3, 8)), ("(3, 8)", "(3, 7)")),
    ("out of higher rank", matmul(A, B, out=f32(1, 3, 7)), ("(1, 3, 7)", "(3, 7)")),
    ("out would broadcast", matmul(A, B, out=f32(1, 7)), ("(1, 7)", "(3, 7)")),
    ("out of vectors", matmul(f32(5), f32(5), out=f32(1)), ("(1,)", "()")),
    ("dim0 too large", transpose(f32(2, 3), 2, 0), ("dim0", "2", "-2 to 1")),
    ("dim1 too small", transpose(f32(2, 3), 0, -3), ("dim1", "-3", "-2 to 1")),
    ("dim of a vector", transpose(f32(2), 1, 0), ("dim0", "1")),
    ("dim of a scalar", transpose(f32(), 1, 0), ("dim0", "1")),
    ("dim as text", transpose(f32(2, 3), "0", 1), ("dim0", "'0'", "an integer")),
    ("dim as float", transpose(f32(2, 3), 0, 1.0), ("dim1", "1.0", "an integer")),
    ("dim as bool", transpose(f32(2, 3), True, 0), ("dim0", "True", "an integer")),
    ("dim None", transpose(f32(2, 3), None, 0), ("dim0", "None", "an integer")),
    ("dims too few", permute(f32(2, 3), (1,)), ("(1,)", "each of 2 dimensions once")),
    ("dims twice", permute(f32(2, 3), (1, -1)), ("(1, -1)", "each of 2 dimensions once")),
    ("dims too large", permute(f32(2, 3), (0, 2)), ("a dimension is 2", "-2 to 1")),
    ("dims as text", permute(f32(2, 3), "10"), ("'10'", "a list or tuple of 2 dimensions")),
    ("dims as bytes", permute(f32(2, 3), b"\1\0"), ("dims is b", "a list or tuple of 2 dimensions")),
    ("dims as a set", permute(f32(2, 3), {1, 0}), ("{0, 1}", "a list or tuple of 2 dimensions")),
    ("a dimension of a scalar", permute(f32(), (0,)), ("(0,)", "each of 0 dimensions once")),
    ("dims as a number", permute(f32(2, 3), 1), ("dims is 1", "a list or tuple of 2 dimensions")),
    ("dims of floats", permute(f32(2, 3), (0, 1.0)), ("1.0", "an integer")),
    ("permuted out", permute(f32(2, 3), (1, 0), out=f32(2, 3)), ("(2, 3)", "(3, 2)")),
    ("transposed out", transpose(f32(2, 3), out=f32(2, 3)), ("(2, 3)", "(3, 2)")),
    ("transposed out, empty", transpose(f32(0, 3), out=f32(0, 3)), ("(0, 3)", "(3, 0)")),
]


def typed(dtype):
    return torch.zeros(3, 3, dtype=dtype)


DTYPES = [
    ("mixed", matmul(typed(torch.float16), typed(torch.float32)), ("float16", "float32", "same dtype")),
    (
        "complex half",
        matmul(typed(torch.complex32), typed(torch.complex32)),
        ("complex32", "complex64", "int8"),
    ),
    (
        "complex and real",
        matmul(typed(torch.complex64), typed(FLOAT)),
        ("complex64", "float32", "same dtype"),
    ),
    (
        "mixed complex",
        matmul(typed(torch.complex64), typed(torch.complex128)),
        ("complex128", "same dtype"),
    ),
    (
        "real out_dtype",
        matmul(typed(torch.complex64), typed(torch.complex64), out_dtype=FLOAT),
        ("complex64", "float32"),
    ),
    (
        "real out",
        matmul(typed(torch.complex64), typed(torch.complex64), out=typed(FLOAT)),
        ("out", "float32"),
    ),
    (
        "conjugated out of matmul",
        matmul(typed(torch.complex64), typed(torch.complex64), out=typed(torch.complex64).conj()),
        ("out", "conjugated"),
    ),
    (
        "fp8 and int8",
        matmul(typed(torch.float8_e4m3fn), typed(torch.int8)),
        ("e4m3fn", "int8", "same dtype"),
    ),
    ("int32", matmul(typed(torch.int32), typed(torch.int32)), ("int32", "float16")),
    ("int64", matmul(typed(torch.int64), typed(torch.int64)), ("int64", "float16")),
    ("uint8", matmul(typed(torch.uint8), typed(torch.uint8)), ("uint8", "float16")),
    ("bool", matmul(typed(torch.bool), typed(torch.bool)), ("bool", "float16")),
    ("input is a list", matmul([[1.0]], B), ("input is", "list", "torch.Tensor")),
    ("other is None", matmul(A, None), ("other is", "NoneType", "torch.Tensor")),
    ("other is a number", matmul(A, 2.0), ("other is", "float", "torch.Tensor")),
    ("other is an array", matmul(A, B.numpy()), ("other is", "ndarray", "torch.Tensor")),
    ("out is a list", matmul(A, B, out=[0]), ("out is", "list", "torch.Tensor")),
    ("sparse COO", matmul(A, B.to_sparse()), ("other is", "sparse_coo", "dense")),
    ("sparse CSR", matmul(A.to_sparse_csr(), B), ("input is", "sparse_csr", "dense")),
    ("fp32 out_dtype", matmul(A, B, out_dtype=torch.float64), ("float32", "float64", "bfloat16")),
    ("fp64 out_dtype", matmul(A.double(), B.double(), out_dtype=FLOAT), ("float64", "float32")),
    ("int8 out_dtype", matmul(typed(torch.int8), typed(torch.int8), out_dtype=torch.int8), ("int8", "int32")),
    ("out_dtype as text", matmul(A, B, out_dtype="float16"), ("float16", "float32")),
    ("out", matmul(A, B, out=f32(3, 7).double()), ("float64", "float32")),
    ("out of a dtype there is", matmul(A, B, out=f32(3, 7).half()), ("out is float16", "or out_dtype")),
    (
        "out of fp8",
        matmul(*[typed(torch.float8_e5m2)] * 2, out=typed(FLOAT)),
        ("wanted bfloat16, or out_dtype",),
    ),
    ("out against out_dtype", matmul(A, B, out=f32(3, 7), out_dtype=torch.float16), ("float32", "float16")),
    ("transpose a list", transpose([[1]]), ("input is", "list", "torch.Tensor")),
    ("transpose sparse", transpose(A.to_sparse()), ("input is", "sparse_coo", "dense")),
    ("transpose nested", transpose(torch.nested.nested_tensor([f32(2, 3)])), ("input is", "nested", "dense")),
    ("transposed out", transpose(A, out=f32(5, 3).half()), ("float16", "float32")),
    (
        "nested out",
        transpose(typed(FLOAT), out=torch.nested.nested_tensor([f32(2, 3)])),
        ("out is", "nested"),
    ),
    ("conjugated out", transpose(typed(torch.complex64), out=typed(torch.complex64).conj()), ("out", "conj")),
]

META = torch.zeros(5, 7, device="meta")
DEVICES = [
    ("b on meta", matmul(A, META), ("meta", "cpu")),
    ("out on meta", matmul(A, B, out=torch.zeros(3, 7, device="meta")), ("out", "meta", "cpu")),
    ("transposed out on meta", transpose(A, out=torch.zeros(5, 3, device="meta")), ("out", "meta", "cpu")),
]
OVERLAPS = [
    ("out expanded", matmul(A, B, out=overlapping(3, 7)), ("(3, 7)", "(0, 0)", "overlaps itself")),
    ("out windows", matmul(A, B, out=torch.zeros(30).as_strided((3, 7), (2, 1))), ("(2, 1)", "itself")),
    ("out is a", matmul(SQUARE, BASE[:, :6].clone(), out=SQUARE), ("out overlaps input:",)),
    ("out is b", matmul(BASE[:, :6].clone(), SQUARE, out=SQUARE), ("out overlaps other:",)),
    ("out is b turned", matmul(BASE[:, :6].clone(), SQUARE, out=SQUARE.mT), ("out overlaps other:",)),
    ("one column shared", matmul(BASE[:, :6], SQUARE, out=BASE[:, 5:11]), ("out overlaps input:",)),
    ("one element shared", matmul(BASE.view(-1)[:30].view(5, 6), SQUARE, out=BASE.view(-1)[29:59].view(5, 6)),
     ("out overlaps input:",)),
    ("transpose in a part", transpose(SQUARE[:4, :4], out=SQUARE[1:5, :4]), ("out overlaps input:",)),
    ("reversal in place", permute(CUBE, (2, 1, 0), out=CUBE.permute(2, 1, 0)), ("out overlaps input:",)),
    ("rotation in place", permute(CUBE, (1, 2, 0), out=CUBE), ("out overlaps input:",)),
    ("transpose onto its view", transpose(SQUARE, out=SQUARE.mT), ("out overlaps input:",)),
    ("transposed out expanded", transpose(A, out=overlapping(5, 3)), ("(5, 3)", "overlaps itself")),
]  # fmt: skip
GRADIENTS = [
    ("a", matmul(f32(3, 5).requires_grad_(), B, out=f32(3, 7)), ("input requires", "no_grad", "detach")),
    ("b", matmul(A, f32(5, 7).requires_grad_(), out=f32(3, 7)), ("other requires", "no_grad", "detach")),
    ("a not leaf", matmul(f32(3, 5).requires_grad_() * 2, B, out=f32(3, 7)), ("input requires", "no_grad")),
    (
        "fp8",
        matmul(typed(torch.float8_e5m2).requires_grad_(), typed(torch.float8_e5m2)),
        ("input requires", "no_grad"),
    ),
    ("out", matmul(A, B, out=f32(3, 7).requires_grad_()), ("out requires", "no_grad")),
    ("x", transpose(f32(3, 5).requires_grad_(), out=f32(5, 3)), ("input requires", "no_grad", "detach")),
    ("transposed out", transpose(A, out=f32(5, 3).requires_grad_()), ("out requires", "no_grad")),
    ("parameter", matmul(torch.nn.Parameter(f32(3, 5)), B, out=f32(3, 7)), ("input requires", "no_grad")),
]
VALUES = [
    ("precision", matmul(A, B, precision="high"), ("'high'", "ieee", "tf32x3", "tf32")),
    ("precision of torch", matmul(A, B, precision=torch.float32), ("float32", "ieee")),
    ("precision of three", matmul(A, B, precision="ieee-3m"), ("'ieee-3m'", "tf32x3")),
    (
        "precision of complex64",
        matmul(typed(torch.complex64), typed(torch.complex64), precision="3m"),
        ("'3m'", "ieee-3m", "tf32x3-3m", "complex64"),
    ),
    (
        "precision of complex128",
        matmul(typed(torch.complex128), typed(torch.complex128), precision="tf32"),
        ("'tf32'", "ieee, ozaki, ieee-3m, ozaki-3m", "complex128"),
    ),
    ("precision of fp16", matmul(A.half(), B.half(), precision="tf32"), ("float16", "float32")),
    (
        "precision of int8",
        matmul(typed(torch.int8), typed(torch.int8), precision="ieee"),
        ("int8", "float32"),
    ),
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


@pytest.mark.parametrize("other", [(), (1,), (3,), (2, 3), (2, 1), (4, 1, 3), (0, 1), (2, 0), (5, 2, 3)])
@pytest.mark.parametrize("one", [(), (1,), (3,), (2, 3), (1, 1, 3), (0, 3), (4, 2, 1)])
def test_shapes_broadcast_as_torch_has_them(one, other):
    try:
        wanted = torch.broadcast_shapes(one, other)
    except RuntimeError:
        with pytest.raises(errors.ShapeError, match="do not broadcast"):
            checks.broadcast(one, other)
    else:
        assert checks.broadcast(one, other) == wanted


def test_memory_of_which_it_is_too_hard_to_tell_counts_as_shared():
    memory = torch.zeros(40937 + 512)
    a = memory.as_strided((2, 2, 6, 8, 5), (2944, 2803, 2991, 178, 534))
    b = memory.as_strided((5, 4, 6, 2, 7), (577, 1246, 712, 2140, 851), 379)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(a.numpy(), b.numpy(), checks._MAX_OVERLAP_WORK)
    assert checks.overlap(a, b)


def test_wrong_calls_leave_out_alone(launches):
    out = torch.full((3, 7), 5.0)
    for b in (f32(4, 7), B.double(), META):
        with pytest.raises(errors.TritileError):
            tritile.matmul(A, b, out=out)
    assert (out == 5.0).all()


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.DeviceError, ValueError),
        (errors.OverlapError, ValueError),
        (errors.GradientError, RuntimeError),
        (errors.UnsupportedError, RuntimeError),
        (errors.InvalidValueError, ValueError),
        (errors.NotTunedError, LookupError),
        (errors.NotCompiledError, LookupError),
    ],
)
def test_errors_are_also_what_python_would_raise(kind, builtin):
    assert issubclass(kind, builtin)
    assert issubclass(kind, tritile.TritileError)


RIGHT = [
    ("fp8 of two kinds", matmul(typed(torch.float8_e4m3fn), typed(torch.float8_e5m2))),
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
]


@pytest.mark.parametrize("call", [call for _, call in RIGHT], ids=[label for label, _ in RIGHT])
def test_unusual_but_right_calls_reach_the_kernel(call, launches):
    call()
    assert len(launches) == 1


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_are_fine_where_none_are_recorded(guard, launches):
    weight, x = f32(5, 7).requires_grad_(), f32(3, 5).requires_grad_()
    with guard():
        tritile.matmul(x, weight)
        tritile.transpose(weight)
    tritile.matmul(x.detach(), weight.detach())
    assert len(launches) == 3


@pytest.mark.parametrize("value", ["fast", "", "CACHED", "tune ", None, 1])
def test_unknown_modes(value):
    with pytest.raises(errors.InvalidValueError, match="cached, tune, strict, off"), tritile.mode(value):
        pass
    if value is not None:
        with pytest.raises(errors.InvalidValueError, match="cached, tune, strict, off"):
            tritile.autotune([], [], mode=value)


def test_unknown_mode_from_outside(monkeypatch):
    monkeypatch.setenv("TRITILE_MODE", "fastest")
    problem = tritile.MatmulProblem(1, 8, 8, 8, "float16", "float16")
    for call in (tritile.current_mode, lambda: tritile.plan(problem, device=tritile.target_device("sm_90"))):
        with pytest.raises(
            errors.InvalidValueError, match=r"TRITILE_MODE.*'fastest'.*cached, tune, strict, off"
        ):
            call()


def test_the_innermost_mode_wins(monkeypatch):
    assert tritile.current_mode() == "cached"
    monkeypatch.setenv("TRITILE_MODE", "off")
    assert tritile.current_mode() == "off"
    with tritile.mode("strict"):
        with tritile.mode("tune"):
            assert tritile.current_mode() == "tune"
        assert tritile.current_mode() == "strict"
    with pytest.raises(KeyError), tritile.mode("tune"):
        raise KeyError
    assert tritile.current_mode() == "off"


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "1s"])
def test_unusable_budgets(monkeypatch, value):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", value)
    with pytest.raises(errors.InvalidValueError, match=r"TRITILE_TUNE_BUDGET.*seconds"):
        tune_budget_s(15.0)


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, 15.0), ("2.5", 2.5), ("1e3", 1000.0), ("inf", float("inf"))]
)
def test_budgets(monkeypatch, value, seconds):
    monkeypatch.delenv("TRITILE_TUNE_BUDGET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITILE_TUNE_BUDGET", value)
    assert tune_budget_s(15.0) == seconds


@pytest.mark.parametrize("wanted", ["~nosuchuser/cache", None])
def test_a_cache_folder_in_the_home_of_nobody_breaks_no_call(monkeypatch, request, wanted):
    """None: as where neither HOME nor the list of users tells it."""
    settings._folder.cache_clear()
    request.addfinalizer(settings._folder.cache_clear)
    if wanted:
        monkeypatch.setenv("TRITILE_CACHE_DIR", wanted)
    else:
        monkeypatch.delenv("TRITILE_CACHE_DIR")
        monkeypatch.setattr(
            settings.platformdirs, "user_cache_dir", lambda name: f"~nosuchuser/.cache/{name}"
        )
    with pytest.warns(errors.StoreWarning, match="has no home folder") as told:
        assert cache_dir() == cache_dir()
    assert cache_dir().is_absolute()
    assert len(told) == 1


@pytest.mark.parametrize("call", [tritile.matmul, tritile.linear])
def test_nothing_for_a_tensor_under_autocast(call):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(errors.DtypeError, match="wanted a"):
        call(torch.ones(3, 4), None)


class Mine(torch.Tensor):
    pass


def test_a_nested_tensor_beside_a_subclass():
    nested = torch.nested.nested_tensor([torch.ones(3, 4)])
    with pytest.raises(errors.DtypeError, match="nested"):
        tritile.matmul(torch.ones(2, 3, 4).as_subclass(Mine), nested)


@pytest.mark.parametrize("kind", [torch.Tensor, Mine])
def test_out_of_inference_mode_is_refused_before_it_is_written(kind):
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


def test_cache_directory(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path
    monkeypatch.setenv("TRITILE_CACHE_DIR", "~/somewhere")
    assert "~" not in str(cache_dir())
    monkeypatch.delenv("TRITILE_CACHE_DIR")
    assert cache_dir().name == "tritile"
