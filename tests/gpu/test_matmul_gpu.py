"""tritile.matmul on a GPU, against float64: dtypes, layouts, sizes, memory, streams, graphs and threads."""

import functools
import itertools
import math
import threading

import pytest
import torch

import tritile
from tests.launched import in_threads, needs_memory, replayed
from tests.reference import (
    DEFAULT_OUT,
    FP8,
    MATMUL_DTYPES,
    assert_product,
    frame,
    guard_intact,
    name,
    placed,
    product64,
    values,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
HALF = (torch.float16, torch.bfloat16)
PRECISIONS = ("ieee", "fp16x3", "tf32")


def skip_unsupported(dtype):
    if dtype in FP8 and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")


def gpu(shape, dtype, seed=0):
    return values(tuple(shape), dtype, seed, "cuda")


def pair(m, n, k, dtype, batch=()):
    return gpu((*batch, m, k), dtype), gpu((*batch, k, n), dtype, 1)


# Layouts by what their names say: NN both in rows, NT the second turned, S with gaps between elements.
TURNS = {"NN": ("row", "row"), "NT": ("row", "column"), "TN": ("column", "row"), "TT": ("column", "column")}
TURNS |= {"SS": ("sparse", "strided"), "sliced": ("sliced", "column_sliced")}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=name)
def test_dtypes_and_layouts(dtype, turn):
    size = (256, 320, 192) if turn in ("NT", "TN") else (131, 97, 61)
    skip_unsupported(dtype)
    a, b = pair(*size, dtype)
    a_layout, b_layout = TURNS[turn]
    got = tritile.matmul(placed(a, a_layout), placed(b, b_layout))
    assert got.dtype == DEFAULT_OUT.get(dtype, dtype)
    assert_product(got, a, b)


SIZES = {
    "large": (1024, 1024, 1024),
    "one": (1, 1, 1),
    "primes": (257, 263, 269),
    "row": (1, 1009, 513),
    "column": (1009, 1, 513),
    "dot": (1, 1, 4099),
    "outer": (311, 313, 1),
    "tall": (4097, 17, 64),
    "deep": (64, 64, 20011),
    "deep aligned": (32, 48, 16384),
    "just past a tile": (129, 257, 65),
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name)
def test_sizes(dtype, size):
    a, b = pair(*SIZES[size], dtype)
    assert_product(tritile.matmul(a, b), a, b)


@pytest.mark.usefixtures("poison")
def test_zero_sizes():
    for m, n, k in itertools.product((0, 1, 7), repeat=3):
        a, b = pair(m, n, k, torch.bfloat16)
        assert_product(tritile.matmul(a, b), a, b)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("count", [65535, 65536, 131073])
def test_more_matrices_than_grid(count):
    a, b = pair(3, 4, 5, torch.float16, (count,))
    assert_product(tritile.matmul(a, b), a, b)
    a = placed(a[:, :1], "sliced")
    assert_product(tritile.matmul(a, b), a, b)


def test_alignment_needs_own_kernel():
    flat_a, flat_b = gpu((64 * 64 + 8,), torch.float16), gpu((64 * 64 + 8,), torch.float16, 1)
    for offset in (0, 1, 0, 4, 8, 1):
        a, b = (flat[offset:][: 64 * 64].view(64, 64) for flat in (flat_a, flat_b))
        assert_product(tritile.matmul(a, b), a, b)


DISTRIBUTIONS = {
    "normal": lambda x: x,
    "positive": lambda x: x.abs(),
    "wide range": lambda x: x * torch.exp2(torch.round(6 * x.roll(1, 0))),
}


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "size", [(512, 512, 512), (257, 131, 1009), (128, 128, 8192), (64, 64, 40000)], ids=str
)
def test_precisions_of_float32(size, spread):
    """IEEE fp32 is at least as exact as torch's; of numbers of one size so are the others, within bounds."""
    a, b = (DISTRIBUTIONS[spread](x) for x in pair(*size, torch.float32))
    exact, errors = product64(a, b), {}
    for precision in (None, *PRECISIONS):
        got = torch.matmul(a, b) if precision is None else tritile.matmul(a, b, precision=precision)
        errors[precision] = float((got.double() - exact).norm() / exact.norm())
        if precision is not None and spread == "normal" and size[2] <= 8192:
            assert_product(got, a, b, precision)
            assert errors[precision] < {"ieee": 1e-6, "fp16x3": 2e-6, "tf32": 4e-4}[precision]
    assert errors["ieee"] <= 1.05 * errors[None]


def test_int8_sums_reach_int32():
    a = torch.full((16, 131071), -128, dtype=torch.int8, device="cuda")
    assert (tritile.matmul(a, a.mT) == 2**31 - 2**14).all()
    assert (tritile.matmul(a, torch.full_like(a, 127).mT) == -128 * 127 * 131071).all()


@pytest.mark.parametrize("dtype", FP8, ids=name)
def test_long_sums_of_fp8(dtype):
    skip_unsupported(dtype)
    a, b = pair(256, 256, 4096, dtype)
    assert_product(tritile.matmul(a, b, out_dtype=torch.float32), a, b)


SIZES_BY_ROWS = (128, 64, 64), (129, 1, 1), (200, 333, 517), (1000, 1003, 1), (128, 5, 4099)
BY_ROWS = [
    *(((), (), *size) for size in SIZES_BY_ROWS),
    *((*batches, 150, 90, 70) for batches in (((2, 1, 3), (1, 4, 3)), ((2, 3, 2), (2, 1, 2)), ((3,), (1,)))),
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "layouts", [("row", "column"), ("column", "column_sliced"), ("sparse", "column")], ids=str
)
@pytest.mark.parametrize("size", BY_ROWS, ids=str)
def test_ieee_products_copying_b(size, layouts):
    of_a, of_b, m, n, k = size
    a, b = gpu((*of_a, m, k), torch.float32), gpu((*of_b, k, n), torch.float32, 1)
    a, b = placed(a, layouts[0]), placed(b, layouts[1])
    shape = (*torch.broadcast_shapes(of_a, of_b), m, n)
    buffer, out = frame(shape, torch.float32, "padded", "cuda")
    assert tritile.matmul(a, b, out=out, precision="ieee") is out
    first = out.clone()
    assert_product(out, a, b)
    assert guard_intact(buffer, out)
    assert torch.equal(tritile.matmul(a, b, precision="ieee"), first)
    assert torch.equal(replayed(lambda: tritile.matmul(a, b, precision="ieee")), first)


KINDS = [*[(dtype, None) for dtype in (*HALF, torch.float64)], *[(torch.float32, p) for p in PRECISIONS]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_nan_and_inf_as_torch(dtype, precision, value):
    a, b = pair(70, 40, 133, dtype)
    a[3, 132] = value
    a[69, 0] = value
    b[132, 5] = 0.0
    b[64, 39] = value
    expected, got = torch.matmul(a, b), tritile.matmul(a, b, precision=precision)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    assert torch.equal(got[got.isinf()], expected[expected.isinf()])


def test_results_too_large_become_inf():
    a = torch.full((33, 100), 200.0, dtype=torch.float16, device="cuda")
    assert (tritile.matmul(a, a.mT) == math.inf).all()
    assert (tritile.matmul(a, a.mT, out_dtype=torch.float32) == 4e6).all()


def check_rows(got, a, b):
    """Some rows exactly, those about the 2^31st element of each tensor among them."""
    rows = a.shape[0]
    near = [2**31 // max(1, t.stride(0)) for t in (a, got)]
    picks = {0, 1, rows - 1, rows - 64} | {n + d for n in near for d in (-1, 0, 1)}
    index = torch.tensor(sorted(p for p in picks if 0 <= p < rows), device="cuda")
    random = torch.randint(rows, (2000,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    index = torch.cat([index, random])
    assert torch.equal(got[index].double(), product64(a[index], b))


@pytest.mark.serial
@pytest.mark.usefixtures("poison")
def test_operand_beyond_2_31():
    needs_memory(8)
    a, b = pair(2**31 // 64 + 77, 16, 64, torch.int8)
    assert a.numel() > 2**31
    check_rows(tritile.matmul(a, b), a, b)


@pytest.mark.serial
def test_column_operand_beyond_2_31():
    needs_memory(8)
    rows = 2**31 // 64 + 77
    a, b = gpu((64, rows), torch.int8).mT, gpu((64, 16), torch.int8, 1)
    check_rows(tritile.matmul(a, b), a, b)
    assert_product(tritile.matmul(b.mT, a[-1000:].mT), b.mT, a[-1000:].mT)


@pytest.mark.serial
def test_output_beyond_2_31():
    needs_memory(12)
    a = torch.randint(-4, 5, (46349, 16), device="cuda", dtype=torch.int8).half()
    b = torch.randint(-4, 5, (16, 46349), device="cuda", dtype=torch.int8).half()
    got = tritile.matmul(a, b)
    assert got.numel() > 2**31
    for rows in (slice(0, 100), slice(46249, 46349), slice(2**31 // 46349 - 5, 2**31 // 46349 + 5)):
        assert torch.equal(got[rows].double(), product64(a[rows], b))


def test_the_current_stream_is_used():
    source, b = pair(300, 200, 100, torch.float32)
    a = torch.zeros_like(source)
    tritile.transpose(tritile.matmul(a, b))  # compiled before, so that the race below would be lost
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        a.copy_(source)
        got = tritile.matmul(a, b)
        turned = tritile.transpose(got)
    stream.synchronize()
    assert_product(got, source, b)
    assert torch.equal(turned, got.mT)


@pytest.mark.parametrize("mode", ["cached", "tune"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
def test_captured_call_replays_unmeasured(monkeypatch, mode, warm):
    monkeypatch.setattr("tritile.tune.now.tuned_now", lambda *args: pytest.fail("measured"))
    a, b = pair(201 + warm, 130, 75 + (mode == "tune"), torch.float16)
    out = torch.empty(a.shape[0], 130, dtype=torch.float16, device="cuda")
    turned = torch.empty_like(out.mT, memory_format=torch.contiguous_format)
    if warm:
        tritile.transpose(tritile.matmul(a, b, out=out), out=turned)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tritile.mode(mode), torch.cuda.graph(graph):
        tritile.transpose(tritile.matmul(a, b, out=out), out=turned)
    for seed in (5, 6):
        a.copy_(gpu(a.shape, a.dtype, seed))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_product(out, a, b)
        assert torch.equal(turned, out.mT)


def test_several_threads_at_once():
    cases = [pair(65 + i % 3, 40, 33 + 7 * (i % 2), (torch.float16, torch.float32)[i % 2]) for i in range(8)]
    barrier = threading.Barrier(len(cases))

    def work(a, b):
        barrier.wait()
        for _ in range(20):
            assert_product(tritile.matmul(a, b), a, b)

    in_threads(*(functools.partial(work, *case) for case in cases))


@pytest.mark.serial
def test_k_beyond_32_bits():
    k = 2**31 - 1
    a = torch.ones(1, k, dtype=torch.int8, device="cuda")
    assert tritile.matmul(a, a.mT).item() == k


@pytest.mark.serial
def test_batch_beyond_32_bits():
    batch = 2**31 + 5
    a = torch.ones(batch, 1, 1, dtype=torch.int8, device="cuda")
    a[-1] = 3
    out = tritile.matmul(a, a)
    assert out[-1].item() == 9
    assert bool((out[:-1] == 1).all())
