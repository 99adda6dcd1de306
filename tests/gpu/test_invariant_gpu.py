"""Batch-invariant calls on a GPU: a row gives the same bits in any company, at any place, under any load.

Two things are held to that: the calls, over numbers of rows that get different configs, and configs by
themselves, which `tritile.families.numerics` says to sum alike.
"""

import contextlib
import functools

import pytest
import torch

import tritile
from tests.reference import assert_product, bytes_of, name, placed, values, words_of
from tritile.core import device as devices
from tritile.families import launching
from tritile.families.space import legal_configs
from tritile.ops import linear_quantized as packed_op
from tritile.ops import memo
from tritile.ops.products import matmul_call

pytestmark = pytest.mark.gpu
BF16, FP16, FP32, FP64, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
E4M3 = torch.float8_e4m3fn
ROWS = (1, 2, 3, 7, 16, 17, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048, 4096)
TOTAL, N, K = 4096, 520, 1000
TRIED = 10  # configs of each kind, spread over the families


@pytest.fixture(autouse=True)
def _mode():
    with tritile.batch_invariant():
        yield


def on_gpu(shape, dtype, seed=0):
    return values(shape, dtype, seed, "cuda")


def places(count):
    """Where a part of so many rows begins: at both ends, and where rows begin on other bytes."""
    return sorted({0, min(1, TOTAL - count), min(37, TOTAL - count), TOTAL - count})


def assert_rows(call, *by_row, op=""):
    """The rows of every part are those of the whole, bit for bit. `by_row`: operands that have rows."""
    whole = call(*by_row)
    for count in ROWS:
        for start in places(count):
            part = call(*(x[start : start + count] for x in by_row))
            same = torch.equal(bytes_of(part), bytes_of(whole[start : start + count]))
            assert same, f"{op}: {count} rows from {start} on"
    return whole


KINDS = [
    (BF16, None, "row", "column", K),
    (BF16, None, "row", "row", K + 1),
    (FP16, None, "column", "column", K),
    (FP32, "ieee", "row", "column", 200),
    (FP32, "tf32", "row", "column", K),
    (FP32, "tf32", "row", "row", K + 1),
    (FP64, None, "row", "row", 200),
    (INT8, None, "row", "column", K),
    (E4M3, None, "row", "column", K + 8),
    (E4M3, None, "row", "column", K + 1),
    (E4M3, "fast", "row", "column", K + 8),
]


def kind_of(case):
    return "-".join(name(part) if isinstance(part, torch.dtype) else str(part) for part in case)


@pytest.mark.parametrize(("dtype", "precision", "of_a", "of_b", "k"), KINDS, ids=map(kind_of, KINDS))
def test_matmul(dtype, precision, of_a, of_b, k):
    a, b = placed(on_gpu((TOTAL, k), dtype), of_a), placed(on_gpu((k, N), dtype, 1), of_b)
    whole = assert_rows(lambda rows: tritile.matmul(rows, b, precision=precision), a)
    assert torch.equal(tritile.matmul(a[9], b, precision=precision), whole[9])
    if precision != "fast":
        assert_product(whole[:64], a[:64], b, precision or "ieee")


def test_a_batch_and_its_rows():
    a, b = on_gpu((8, 50, K), BF16), on_gpu((K, N), BF16, 1)
    whole = tritile.matmul(a, b)
    assert torch.equal(tritile.matmul(a[3], b), whole[3])
    assert torch.equal(tritile.matmul(a.mT.contiguous().mT, b), whole)
    assert torch.equal(tritile.matmul(a, b.expand(8, K, N).contiguous()), whole)


def operations(dtype):
    """Calls of rows of K numbers by name: the call, and what else has rows."""
    weight, up = on_gpu((N, K), dtype, 1), on_gpu((N, K), dtype, 2)
    bias, full = on_gpu((N,), dtype, 3), on_gpu((TOTAL, N), dtype, 4)
    for act in (None, "gelu", "silu"):
        linear = functools.partial(tritile.linear, weight=weight, bias=bias, activation=act)
        yield f"linear {act}", linear, ()
        yield f"residual {act}", lambda x, y, linear=linear: linear(x, residual=y), (full,)
    yield "addmm", lambda x, y: tritile.addmm(y, x, weight.t(), beta=0.3, alpha=1.7), (full,)
    yield "gated", lambda x: tritile.gated_linear(x, weight, up), ()
    if dtype == FP32:  # a result of many rows by one column lies by columns, that of one row does not
        for precision in ("ieee", "tf32"):
            yield precision, lambda x, how=precision: tritile.matmul(x, weight[0], precision=how), ()
        return
    for bits, zeros in ((4, False), (4, True), (8, False)):
        packed = tritile.quantize(weight, bits=bits, group_size=128, zero_points=zeros)
        yield f"int{bits}{' with zeros' * zeros}", lambda x, own=packed: tritile.linear(x, own, bias), ()


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=name)
def test_operations(dtype, part):
    """In parts, which compile side by side."""
    x = on_gpu((TOTAL, K), dtype)
    for op, call, more in list(operations(dtype))[part::4]:
        assert_rows(call, x, *more, op=op)


@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=name)
def test_scaled_matmul(dtype):
    a, b = on_gpu((TOTAL, 1008), dtype), on_gpu((N, 1008), dtype, 1).t()
    of_rows, of_columns = on_gpu((TOTAL, 1), FP32).abs(), on_gpu((1, N), FP32, 1).abs()
    bias = on_gpu((N,), BF16, 2)
    assert_rows(lambda rows, s: tritile.scaled_matmul(rows, b, s, of_columns, bias=bias), a, of_rows)


@pytest.mark.parametrize(
    ("dtype", "precision", "k"),
    [(BF16, None, K), (BF16, None, K + 1), (FP32, "tf32", 200)],
    ids=str,
)  # fmt: skip
def test_rows_of_groups_move(dtype, precision, k):
    """The same 300 rows of a group at other places, beside other groups, and as several groups of one b."""
    mine, b = on_gpu((300, k), dtype), on_gpu((4, N, k), dtype, 1).mT
    found = []
    for total, ends, start in (
        (300, [0, 300, 300, 300], 0),
        (1000, [17, 317, 600, 1000], 17),
        (2048, [1748, 2048, 2048, 2048], 1748),
        (301, [1, 301, 301, 301], 1),
        (4096, [3000, 3300, 3300, 4090], 3000),
    ):
        rows = on_gpu((total, k), dtype, total)
        rows[start : start + 300] = mine
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        out = tritile.grouped_matmul(rows, b, offs, precision=precision)
        found.append(bytes_of(out[start : start + 300]))
    assert [torch.equal(made, found[0]) for made in found] == [True] * len(found)
    for count in (1, 7, 65, 299):
        offs = torch.tensor([0, count, count, count], dtype=torch.int32, device="cuda")
        part = tritile.grouped_matmul(mine[:count], b, offs, precision=precision)
        assert torch.equal(bytes_of(part), found[0][: part.numel() * part.element_size()])


def test_the_same_under_load():
    """Other work on the GPU changes when programs run, and nothing else."""
    a, b = on_gpu((TOTAL, K), BF16), on_gpu((N, K), BF16, 1).t()
    weight = tritile.quantize(on_gpu((N, 1024), BF16), bits=4, group_size=128)
    x = on_gpu((TOTAL, 1024), BF16, 1)
    calls = [lambda m=m: tritile.matmul(a[:m], b) for m in (1, 17, 300, TOTAL)]
    calls += [lambda m=m: tritile.linear(x[:m], weight) for m in (1, 17, 300)]
    alone = [call() for call in calls]
    torch.cuda.synchronize()
    busy, large = torch.cuda.Stream(), on_gpu((8192, 8192), BF16)
    with torch.cuda.stream(busy):
        for _ in range(60):  # some 80 ms
            large = large @ large * 1e-3
    beside = [[call() for call in calls] for _ in range(5)]
    torch.cuda.synchronize()
    for made in beside:
        assert all(torch.equal(one, other) for one, other in zip(made, alone, strict=True))


def some(configs):
    """A few of them, from all along the list, which goes family by family."""
    return configs[:: max(1, len(configs) // TRIED)]


def assert_alike(call, out):
    """Each of some configs that count as summing alike leaves the same bits in `out`."""
    bits, ran = [], []
    for config in some(legal_configs(call.problem, devices.gpu(0))):
        words_of(out).fill_(-1)  # NaN, of floats
        with contextlib.suppress(tritile.errors.TuningError):  # what does not compile sums nothing
            launching.prepare(call, config)(*call.tensors)
            bits.append(bytes_of(out))
            ran.append(config)
    assert len(ran) > 1
    unlike = [str(config) for config, made in zip(ran, bits, strict=True) if not torch.equal(made, bits[0])]
    assert unlike == [], f"unlike {ran[0]}"


@pytest.mark.parametrize("m", [70, 1000])
@pytest.mark.parametrize(("dtype", "precision", "of_a", "of_b", "k"), KINDS, ids=map(kind_of, KINDS))
def test_configs_that_count_as_alike_are(dtype, precision, of_a, of_b, k, m):
    a, b = placed(on_gpu((m, k), dtype), of_a), placed(on_gpu((k, N), dtype, 1), of_b)
    out = torch.empty(m, N, dtype={E4M3: BF16, INT8: torch.int32}.get(dtype, dtype), device="cuda")
    assert_alike(matmul_call(a, b, out, precision or "ieee"), out)


EPILOGUES = {
    "weighted row": lambda full, row, column: {"bias": row, "alpha": 1.7, "beta": 0.3},
    "weighted full": lambda full, row, column: {"bias": full, "alpha": 1.7, "beta": 0.3},
    "scales and bias": lambda full, row, column: {
        "scale_a": column.float(), "scale_b": row.float(), "bias": row
    },
    "scales, gelu and residual": lambda full, row, column: {
        "scale_a": column.float(), "scale_b": row.float(), "bias": row, "residual": full, "activation": "gelu"
    },
    "gelu_tanh and residual": lambda full, row, column: {
        "bias": row, "residual": full, "activation": "gelu_tanh"
    },
}  # fmt: skip


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_compiled_alike(epilogue):
    """A multiplication that an addition follows is one fused operation in every kernel, or in none."""
    a, b, full = on_gpu((300, K), BF16), on_gpu((N, K), BF16, 1).t(), on_gpu((300, N), BF16, 2)
    out = torch.empty(300, N, dtype=FP32, device="cuda")
    extras = EPILOGUES[epilogue](full, full[:1], full[:, :1])
    assert_alike(matmul_call(a, b, out, "ieee", **extras), out)


@pytest.mark.parametrize("m", [1, 70, 1000])
@pytest.mark.parametrize("zeros", [False, True])
def test_configs_of_packed_weights_are_alike(zeros, m):
    weight = tritile.quantize(on_gpu((N, 1024), BF16), bits=4, group_size=64, zero_points=zeros)
    x, out = on_gpu((m, 1024), BF16, 1), torch.empty(m, N, dtype=BF16, device="cuda")
    assert_alike(packed_op.quantized_call(x, weight, None, out), out)


def test_torchs_deterministic_algorithms_change_nothing():
    """Parts of K, which the default shares among programs, are added in their order."""
    a, b = on_gpu((64, 16384), BF16), on_gpu((16384, 512), BF16, 1)
    with tritile.batch_invariant(False):
        without = [tritile.matmul(a, b) for _ in range(20)]
        torch.use_deterministic_algorithms(True)
        try:
            under = [tritile.matmul(a, b) for _ in range(20)]
        finally:
            torch.use_deterministic_algorithms(False)
    assert [torch.equal(made, without[0]) for made in (*without, *under)] == [True] * 40


def test_both_ways_are_remembered_apart():
    """A call met before is launched as the mode of this call wants, not as that of the last."""
    tritile.forget()
    a, b = on_gpu((4, 8192), BF16), on_gpu((8192, N), BF16, 1)
    inside = tritile.matmul(a, b)
    with tritile.batch_invariant(False):
        outside = tritile.matmul(a, b)
        assert torch.equal(tritile.matmul(a, b), outside)
    assert torch.equal(tritile.matmul(a, b), inside)
    assert len(memo.CALLS) == 2
