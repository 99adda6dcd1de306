"""Suites: what they hold, the problems they pose, what bad files are told; and those that are unseen."""

from pathlib import Path

import pytest

import bench
import benchmark_results
import unseen
from tests.commands import run
from tritile.choose import pick
from tritile.choose.classes import MOVED as BYTES
from tritile.choose.classes import OPERATIONS
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.settings import cache_dir, table_path
from tritile.errors import InvalidValueError
from tritile.lab.bench import BenchResult
from tritile.tune.suites import OPS, SHIPPED, Case, find, load, parse_shape

H200 = TARGETS["nvidia-h200"]
CONFIG = Config.of(BLOCK_M=64)
GOOD = '[[cases]]\nop = "matmul"\ndtypes = ["float16"]\nlayouts = ["NN"]\n'
SIZES = 'sizes = ["256x256x256"]\n'
MOVED = '[[cases]]\nop = "permute"\ndtypes = ["uint8"]\nsizes = ["8x8"]\n'


def test_suites_that_ship_are_whole() -> None:
    names = [path.stem for path in SHIPPED.glob("*.toml")]
    cases = find(names, SHIPPED)
    assert len(cases) == len(set(cases)) > 600
    assert {case.suite for case in cases} == set(names)
    assert {case.op for case in cases} == set(OPS)


def test_sizes_crossed_with_orders(tmp_path: Path) -> None:
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


WRONG_SHAPES = {
    "matmul": ["4096", "4096x4096", "1x2x3x4x5", "0x4x4", "-1x4x4", "4x4x", "4 x4x4", "4x4x" + "9" * 5000],
    "permute": ["4", "0x3"],
    "conv": ["4x4x4"],
}


@pytest.mark.parametrize(("op", "text"), [(op, text) for op, texts in WRONG_SHAPES.items() for text in texts])
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
        (GOOD + 'sizes = ["0x8x8"]', "entry 1: 0x8x8: sizes must be at least 1"),
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


def test_find_suites_once(tmp_path: Path) -> None:
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


# --- Suites whose sizes are drawn from a seed


def test_products_drawn_in_range():
    cases = unseen.draw("range", 400, 0)
    assert cases == unseen.draw("range", 400, 0)
    assert not set(cases) & set(unseen.draw("another tree", 400, 0))
    assert {case.layout for case in cases} == {"NN", "NT"}
    for case in cases:
        assert 1 <= case.m <= 16384
        assert OPERATIONS[0] <= case.problem.flops <= OPERATIONS[1]
    even = [case for case in cases if case.n % 64 == case.k % 64 == 0]
    odd = [case for case in cases if case.n % 8 and case.k % 8]
    assert 0.5 < len(even) / len(cases) < 0.7
    assert 0.1 < len(odd) / len(cases) < 0.25
    assert sum(case.m < 128 for case in cases) / len(cases) > 0.3  # few rows are as likely as many


def test_half_drawn_by_time():
    """20 us at 800 TFLOP/s, or at 88.3% of an H200's bandwidth."""
    cases = unseen.draw_by_time("long", 300)
    assert not set(cases) & set(unseen.draw("long", 300, 0))
    assert len({case.layout for case in cases}) == 2
    by_memory = 0
    for case in cases:
        operations_us = 2 * case.m * case.n * case.k / 800e6
        bytes_us = 2 * (case.m * case.k + case.k * case.n + case.m * case.n) / (0.883 * 4800e3)
        assert max(operations_us, bytes_us) >= 20
        assert case.problem.flops <= OPERATIONS[1]
        by_memory += bytes_us > operations_us
    assert 0.1 < by_memory / len(cases) < 0.9


def test_permutations_drawn_in_range():
    cases = unseen.draw("moved", 0, 150)
    assert len({case.dtype for case in cases}) == 5
    assert {len(case.shape) for case in cases} == {2, 3, 4, 5}
    for case in cases:
        assert BYTES[0] <= case.problem.bytes / 2 <= BYTES[1]
        assert case.dims != tuple(range(len(case.dims)))


def test_seed_keeps_sizes():
    """A line names its seed: anyone can draw its sizes again."""
    first, second, *_ = unseen.draw("9ca5e47a185f8357d8edac32ed1f0a2dc3da615c")
    assert first.problem.label == "13763x5392x1552 NN bfloat16"
    assert second.problem.label == "375x201x1141 NT bfloat16"


def test_seed_given_or_of_files(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITILE_SEED", raising=False)
    monkeypatch.setattr(unseen, "_PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("A = 1\n")
    first = unseen.seed_of()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("compiled")
    assert unseen.seed_of() == first
    (tmp_path / "a.py").write_text("A = 2\n")
    assert unseen.seed_of() != first
    monkeypatch.setenv("TRITILE_SEED", "set")
    assert unseen.seed_of() == "set"


def test_nothing_remembered_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITILE_TABLE", str(tmp_path / "table.json"))
    with unseen.nothing_remembered():
        (case, *_), inside = unseen.searched(unseen.draw("a tree")), cache_dir()
        assert inside != tmp_path
        assert table_path() is None
        chosen = pick.plan_for(case.problem, H200, "cached")
    assert (cache_dir(), table_path()) == (tmp_path, tmp_path / "table.json")
    assert not inside.exists()
    assert chosen.source == "predicted"


def test_drawn_calls_are_compiled(monkeypatch):
    compiled, device = [], H200
    monkeypatch.setattr(unseen, "compile_calls", lambda calls, device: compiled.append(calls))
    cases = unseen.draw("a tree", 3, 2)
    unseen.compile_all(cases, device)
    (calls,) = compiled
    pairs = [(config, problem) for config, problems in calls.items() for problem in problems]
    assert {problem: config for config, problem in pairs} == {
        case.problem: pick.plan_for(case.problem, device, "cached").config for case in cases
    }
    unseen.compile_all(cases, TARGETS["gfx942"])  # whose kernels are not compiled ahead
    assert len(compiled) == 1


def test_command_draws_and_searches(monkeypatch, tmp_path):
    compiled, asked = [], {}

    def measured(case, others, log):
        asked[case] = others is not None
        assert cache_dir() != tmp_path / "cache"
        times, searched = (1.0, 2.0, 0.0, 0.0, 0.0, None), {"inductor": 3.0} if others else {}
        return BenchResult(case.problem, H200, *times, CONFIG, "predicted", others_us=searched)

    monkeypatch.setenv("TRITILE_SEED", "given")
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tritile.core.device.current_gpu", lambda: H200)
    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench, "_host_calls", lambda: [])
    monkeypatch.setattr(unseen, "compile_all", lambda cases, device: compiled.append(list(cases)))
    monkeypatch.setattr(unseen, "SEARCHED", 5)
    words = ["--suite", "unseen", "--draw", "1", "--draw", "2", "--inductor"]
    done = run("bench.py", *words, "--output", tmp_path, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "against torch" in done.stdout
    assert "against inductor" in done.stdout
    seeds = [unseen.seed_of(number) for number in (1, 2)]
    by_draw = [draw(seed) for seed in seeds for draw in (unseen.draw, unseen.draw_by_time)]
    assert compiled == by_draw
    assert set(asked) == {case for cases in by_draw for case in cases}
    searched = [case for case, inductor in asked.items() if inductor]
    products = [[case for case in cases if case.op == "matmul"] for cases in by_draw]
    halves = [(cases, ragged) for cases in products for ragged in (False, True)]
    assert searched == [
        case
        for cases, ragged in halves
        for case in [each for each in cases if bool(each.n % 8 or each.k % 8) is ragged][:5]
    ]
    lines = benchmark_results.read(tmp_path / "unseen.jsonl", pytest.fail)
    assert [line["env"]["seed"] for line in (lines[0], lines[-1])] == ["given", unseen.seed_of(2)]
    assert [line["env"]["drawn"] for line in (lines[0], lines[-1])] == ["by size", "by time"]
    assert len(lines) == sum(map(len, by_draw))
