"""Suites: what they hold, the problems they pose, and what bad files are told."""

from pathlib import Path

import pytest

from tritile.errors import InvalidValueError
from tritile.tune.suites import OPS, SHIPPED, Case, find, load, parse_shape

GOOD = '[[cases]]\nop = "matmul"\ndtypes = ["float16"]\nlayouts = ["NN"]\n'
SIZES = 'sizes = ["256x256x256"]\n'
MOVED = '[[cases]]\nop = "permute"\ndtypes = ["uint8"]\nsizes = ["8x8"]\n'


def test_suites_that_ship_are_whole() -> None:
    names = [path.stem for path in SHIPPED.glob("*.toml")]
    cases = find(names, SHIPPED)
    assert len(cases) == len(set(cases)) > 600
    assert {case.suite for case in cases} == set(names)
    assert {case.op for case in cases} == set(OPS)


def test_sizes_are_crossed_and_orders_are_for_each_or_all(tmp_path: Path) -> None:
    text = GOOD + 'm = [1, 2]\nsizes = ["3x4", "5x6"]\n'
    text += '[[cases]]\nop = "permute"\ndtypes = ["uint8"]\nsizes = ["2x3x4", "5x6x7"]\ndims = [[2, 0, 1]]'
    (tmp_path / "mine.toml").write_text(text)
    *products, one, other = load(tmp_path / "mine.toml")
    assert [(case.m, case.n, case.k) for case in products] == [(1, 3, 4), (2, 3, 4), (1, 5, 6), (2, 5, 6)]
    assert (one.shape, one.dims, other.shape, other.dims) == ((2, 3, 4), (2, 0, 1), (5, 6, 7), (2, 0, 1))


@pytest.mark.parametrize(
    ("text", "dtype", "layout", "out", "aligns"),
    [
        ("4096x4096x4096", "bfloat16", "NN", "bfloat16", (16, 16, 16)),
        ("4096x4096x4090", "bfloat16", "NN", "bfloat16", (4, 16, 16)),  # k = 4090 is the stride of a's rows
        ("4096x4096x4090", "bfloat16", "NT", "bfloat16", (4, 4, 16)),  # and of b's, if b lies as n x k
        ("4096x4096x4090", "bfloat16", "TN", "bfloat16", (16, 16, 16)),  # but not if a lies as k x m
        ("1001x1003x1007", "float32", "NN", "float32", (4, 4, 4)),
        ("1001x1004x1006", "float16", "TT", "float16", (2, 4, 8)),
        ("3000x5001x7002", "float64", "NN", "float64", (16, 8, 8)),
        ("7x3x5", "int8", "NN", "int32", (1, 1, 4)),
        ("8x6x10", "float8_e4m3fn", "NT", "bfloat16", (2, 2, 4)),
        ("8192x8192", "uint8", None, None, (16, 16)),
        ("8191x8193", "uint8", None, None, (1, 1)),
        ("100x1026", "bfloat16", None, None, (4, 8)),  # x's rows are n apart, out's are m apart
        ("64x1023x1025", "float64", None, None, (8, 8)),
        ("8191x8193", "complex128", None, None, (16, 16)),
    ],
)
def test_alignments_of_products_and_transposes(text, dtype, layout, out, aligns) -> None:
    if layout is None:
        problem = parse_shape(text, op="permute", dtype=dtype).problem
        assert (problem.x_align, problem.out_align) == aligns
        assert (problem.x_layout, problem.out_layout) == ("row", "column")
    else:
        problem = parse_shape(text, dtype=dtype, layout=layout).problem
        assert problem.out_dtype == out
        assert (problem.a_align, problem.b_align, problem.out_align) == aligns


def test_parse_shape() -> None:
    given = parse_shape("8x1024X512x128", dtype="float32", layout="NT", precision="tf32", suite="mine")
    assert given == Case("mine", "matmul", "float32", "NT", 8, 1024, 512, 128, "tf32")
    assert parse_shape("2x3x5", op="permute") == Case(
        "given", "permute", "bfloat16", shape=(2, 3, 5), dims=(0, 2, 1)
    )


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("4096", "matmul"), ("4096x4096", "matmul"), ("1x2x3x4x5", "matmul"), ("0x4x4", "matmul"),
        ("-1x4x4", "matmul"), ("4x4x", "matmul"), ("4 x4x4", "matmul"), ("4x4x" + "9" * 5000, "matmul"),
        ("4", "permute"), ("0x3", "permute"), ("4x4x4", "conv"),
    ],
)  # fmt: skip
def test_parse_shape_refuses(text: str, op: str) -> None:
    with pytest.raises(InvalidValueError):
        parse_shape(text, op=op)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cases = [", "mine.toml"),
        ('title = "x"\n' + GOOD + SIZES, "unknown keys title"),
        ("description = 3\n" + GOOD + SIZES, "description"),
        ('description = "none"', "cases"),
        (GOOD, "sizes"),
        (GOOD + SIZES + "nk = [8]", "unknown keys nk"),
        (GOOD + "sizes = [8]", "sizes = "),
        (GOOD + 'sizes = ["0x8x8"]', "1 and more"),
        (GOOD + 'sizes = ["8x8x8", "8x8x8"]', "twice"),
        (GOOD + 'sizes = ["8x8"]', "MxNxK"),
        (GOOD + SIZES + 'm = ["1"]', "m = "),
        (GOOD + SIZES + 'split = "k"', "unknown keys split"),
        (GOOD + SIZES + 'block_scales = ["1x128"]', "unknown keys block_scales"),
        (GOOD + SIZES + 'precisions = ["tf32"]', "a precision of ieee"),
        (GOOD.replace("matmul", "conv") + SIZES, "matmul, grouped, permute"),
        (GOOD.replace("float16", "half") + SIZES, "dtype"),
        (GOOD.replace("NN", "AB") + SIZES, "layout"),
        (GOOD.replace("matmul", "permute") + SIZES, "unknown keys layouts"),
        (MOVED + "dims = [[0, 0]]", "order"),
        (MOVED + "dims = [[1, 0], [0, 1]]", "one for each"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InvalidValueError, match=told) as caught:
        load(tmp_path / "mine.toml")
    assert "mine.toml" in str(caught.value)
    (tmp_path / "latin.toml").write_bytes(b'description = "\xe9"')
    for name in ("missing.toml", "latin.toml"):
        with pytest.raises(InvalidValueError, match=name):
            load(tmp_path / name)


def test_find_takes_each_suite_once_and_in_order(tmp_path: Path) -> None:
    both = find(["deep", "square", "deep"], SHIPPED)
    assert both == load(SHIPPED / "deep.toml") + load(SHIPPED / "square.toml")
    with pytest.raises(InvalidValueError, match="batched"):  # says which there are
        find(["../suites/deep"], SHIPPED)
    with pytest.raises(InvalidValueError, match="none"):
        find(["deep"], tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "matmul", "dtype": "float16", "m": 8, "n": 8},
        {"op": "matmul", "dtype": "float16", "m": 8, "n": 8, "k": 8, "dims": (1, 0)},
        {"op": "matmul", "dtype": None, "m": 8, "n": 8, "k": 8},
        {"op": "permute", "dtype": "float16", "shape": (8, 8), "dims": (0, 2)},
        {"op": "permute", "dtype": "float16", "shape": (8, 8), "dims": (1, 0), "m": 8},
    ],
)
def test_case_refuses_what_does_not_fit(fields: dict) -> None:
    with pytest.raises(InvalidValueError):
        Case(suite="mine", **fields)
