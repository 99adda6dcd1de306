"""tritile.matmul on a GPU, against float64: dtypes, layouts, sizes, memory, streams, graphs and threads."""

import itertools
import math
import threading

import pytest
import torch

import tritile
from tests.configs import tile
from tests.launched import launched, needs_memory
from tests.reference import (
    DEFAULT_OUT,
    FP8,
    LAYOUTS,
    MATMUL_DTYPES,
    assert_product,
    bytes_of,
    frame,
    guard_intact,
    name,
    placed,
    product64,
    values,
)
from tritile.errors import GradientError, TritileError, TuningError
from tritile.ops import asked
from tritile.ops.described import described
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
HALF = (torch.float16, torch.bfloat16)
PRECISIONS = ("ieee", "fp16x3", "tf32x3", "tf32")


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
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((300,), (300,)),
        ((3, 70, 300), (300, 50)),
        ((70, 300), (3, 300, 50)),
        ((5, 1, 33, 65), (4, 65, 17)),
        ((3, 1, 2, 1, 9, 33), (4, 1, 1, 33, 21)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_batches_and_broadcasting(a_shape, b_shape, dtype):
    a, b = gpu(a_shape, dtype), gpu(b_shape, dtype, 1)
    assert_product(tritile.matmul(a, b), a, b)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("count", [65535, 65536, 131073])
def test_more_matrices_than_a_grid_axis_holds(count):
    a, b = pair(3, 4, 5, torch.float16, (count,))
    assert_product(tritile.matmul(a, b), a, b)
    a = placed(a[:, :1], "sliced")
    assert_product(tritile.matmul(a, b), a, b)


@pytest.mark.parametrize(
    ("stride", "offset"), [(1024, 0), (1032, 0), (1028, 0), (1026, 2), (1025, 1), (1032, 8)]
)
def test_alignment_classes(stride, offset):
    def shifted(rows, seed):
        flat = gpu((offset + rows * stride,), torch.float16, seed)
        return flat[offset:].view(rows, stride)[:, :1000]

    a, b = shifted(70, 0), shifted(90, 1).mT
    assert_product(tritile.matmul(a, b), a, b)
    out = shifted(70, 2)[:, :90]
    assert_product(tritile.matmul(a, b, out=out), a, b)


def test_one_kernel_is_not_used_for_another_alignment():
    flat_a, flat_b = gpu((64 * 64 + 8,), torch.float16), gpu((64 * 64 + 8,), torch.float16, 1)
    for offset in (0, 1, 0, 4, 8, 1):
        a, b = (flat[offset:][: 64 * 64].view(64, 64) for flat in (flat_a, flat_b))
        assert_product(tritile.matmul(a, b), a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8], ids=name)
def test_out_is_filled_and_nothing_around_it(dtype, layout):
    a, b = pair(131, 70, 65, dtype, (3,))
    buffer, out = frame((3, 131, 70), DEFAULT_OUT.get(dtype, dtype), layout, "cuda")
    for _ in range(2):  # the second call takes the fast path
        assert tritile.matmul(a, b, out=out) is out
        assert_product(out, a, b)
        assert guard_intact(buffer, out)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, *FP8], ids=name)
@pytest.mark.parametrize("out_dtype", [*HALF, torch.float32], ids=name)
def test_out_dtypes(dtype, out_dtype):
    skip_unsupported(dtype)
    a, b = pair(129, 65, 200, dtype)
    got = tritile.matmul(a, b, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert_product(got, a, b)


def relative_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


DISTRIBUTIONS = {
    "normal": lambda x: x,
    "positive": lambda x: x.abs(),
    "wide range": lambda x: x * torch.exp2(torch.round(6 * x.roll(1, 0))),
}


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "size", [(512, 512, 512), (257, 131, 1009), (128, 128, 8192), (64, 64, 40000)], ids=str
)
def test_ieee_is_at_least_as_exact_as_torch(size, spread):
    a, b = (DISTRIBUTIONS[spread](x) for x in pair(*size, torch.float32))
    exact = product64(a, b)
    ours = relative_error(tritile.matmul(a, b, precision="ieee"), exact)
    assert ours <= 1.05 * relative_error(torch.matmul(a, b), exact)


@pytest.mark.parametrize("size", [(512, 512, 512), (257, 131, 1009), (64, 64, 8192)], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_keep_their_bounds(precision, size):
    a, b = pair(*size, torch.float32)
    got = tritile.matmul(a, b, precision=precision)
    assert_product(got, a, b, precision)
    error = relative_error(got, product64(a, b))
    assert error < {"ieee": 1e-6, "fp16x3": 2e-6, "tf32x3": 1e-5, "tf32": 2e-3}[precision]


def test_the_default_precision_follows_torch(cuda_matmul):
    a, b = pair(256, 256, 256, torch.float32)
    for setting, precision in (("ieee", "ieee"), ("tf32", "tf32"), ("ieee", "ieee")):
        cuda_matmul.fp32_precision = setting
        assert tritile.plan(tritile.matmul, a, b).problem.precision == precision
        default, named = tritile.matmul(a, b), tritile.matmul(a, b, precision=precision)
        assert torch.equal(default, named)
        other = tritile.matmul(a, b, precision="tf32" if precision == "ieee" else "ieee")
        assert not torch.equal(default, other)


@pytest.mark.parametrize("k", [1, 31, 32, 1000, 65537])
def test_int8_is_exact(k):
    a, b = pair(70, 33, k, torch.int8)
    assert_product(tritile.matmul(a, b), a, b)


def test_int8_sums_reach_the_ends_of_int32():
    a = torch.full((16, 131071), -128, dtype=torch.int8, device="cuda")
    assert (tritile.matmul(a, a.mT) == 2**31 - 2**14).all()
    assert (tritile.matmul(a, torch.full_like(a, 127).mT) == -128 * 127 * 131071).all()


@pytest.mark.parametrize("dtype", FP8, ids=name)
@pytest.mark.parametrize("size", [(256, 256, 4096), (100, 52, 999), (16, 16, 16)], ids=str)
def test_fp8(dtype, size):
    skip_unsupported(dtype)
    a, b = pair(*size, dtype)
    assert_product(tritile.matmul(a, b, out_dtype=torch.float32), a, b)


KINDS = [*[(dtype, None) for dtype in (*HALF, torch.float64)], *[(torch.float32, p) for p in PRECISIONS]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_nan_and_inf_spread_as_in_torch(dtype, precision, value):
    a, b = pair(70, 40, 133, dtype)
    a[3, 132] = value
    a[69, 0] = value
    b[132, 5] = 0.0
    b[64, 39] = value
    expected, got = torch.matmul(a, b), tritile.matmul(a, b, precision=precision)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    assert torch.equal(got[got.isinf()], expected[expected.isinf()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name)
@pytest.mark.parametrize("k", [1, 15, 33, 127])
def test_nan_just_outside_of_a_slice_does_not_leak(dtype, k):
    a, b = pair(65, 33, k, dtype)
    for a_layout, b_layout in (
        ("sliced", "sliced"),
        ("column_sliced", "column_sliced"),
        ("offset", "strided"),
    ):
        assert_product(tritile.matmul(placed(a, a_layout), placed(b, b_layout)), a, b)


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
def test_an_operand_beyond_2_to_31_elements():
    needs_memory(8)
    a, b = pair(2**31 // 64 + 77, 16, 64, torch.int8)
    assert a.numel() > 2**31
    check_rows(tritile.matmul(a, b), a, b)


@pytest.mark.serial
def test_a_column_operand_beyond_2_to_31_elements():
    needs_memory(8)
    rows = 2**31 // 64 + 77
    a, b = gpu((64, rows), torch.int8).mT, gpu((64, 16), torch.int8, 1)
    check_rows(tritile.matmul(a, b), a, b)
    assert_product(tritile.matmul(b.mT, a[-1000:].mT), b.mT, a[-1000:].mT)


@pytest.mark.serial
def test_an_output_beyond_2_to_31_elements():
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
    tritile.matmul(a, b)  # compiled before, so that the race below would be lost
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        a.copy_(source)
        got = tritile.matmul(a, b)
    stream.synchronize()
    assert_product(got, source, b)


@pytest.mark.parametrize("mode", ["cached", "tune"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
def test_a_captured_call_measures_nothing_and_replays(monkeypatch, mode, warm):
    monkeypatch.setattr("tritile.tune.now.tuned_now", lambda *args: pytest.fail("measured"))
    a, b = pair(201 + warm, 130, 75 + (mode == "tune"), torch.float16)
    out = torch.empty(a.shape[0], 130, dtype=torch.float16, device="cuda")
    if warm:
        tritile.matmul(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tritile.mode(mode), torch.cuda.graph(graph):
        tritile.matmul(a, b, out=out)
    for seed in (5, 6):
        a.copy_(gpu(a.shape, a.dtype, seed))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_product(out, a, b)


def test_several_threads_at_once():
    cases = [pair(65 + i % 3, 40, 33 + 7 * (i % 2), (torch.float16, torch.float32)[i % 2]) for i in range(8)]
    barrier, failures = threading.Barrier(len(cases)), []

    def work(a, b):
        try:
            barrier.wait(60)
            for _ in range(20):
                assert_product(tritile.matmul(a, b), a, b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=name)
def test_the_second_call_is_the_first_again_and_prepares_nothing(monkeypatch, dtype):
    a, b = pair(131, 70, 300, dtype)
    first = tritile.matmul(a, b)
    out = torch.empty_like(first)
    tritile.matmul(a, b, out=out)
    monkeypatch.setattr(asked, "prepared", lambda call: pytest.fail("prepared again"))
    again = tritile.matmul(a, b)
    assert again.data_ptr() != first.data_ptr()
    assert torch.equal(bytes_of(again), bytes_of(first))
    out.zero_()
    assert torch.equal(bytes_of(tritile.matmul(a, b, out=out)), bytes_of(first))
    other = gpu(a.shape, dtype, 9)
    assert_product(tritile.matmul(other, b), other, b)  # other memory, the same launch


@pytest.mark.parametrize("config", [tile(16, 16, 16, 1), tile(64, 128, 32, 8, 4), tile(64, 32, 32, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name)
def test_any_legal_config_gives_the_answer(config, dtype):
    a, b = pair(201, 99, 530, dtype)
    out = torch.full((201, 99), math.nan, dtype=dtype, device="cuda")
    launched(described(a, b, out, "ieee"), config)
    assert_product(out, a, b)


def test_a_config_that_does_not_run_gives_way(monkeypatch):
    original, refused = launch.prepare, []

    def prepare(call, config, **options):
        if len(refused) < 2:
            refused.append(config)
            raise TuningError("out of resources")
        return original(call, config, **options)

    monkeypatch.setattr(launch, "prepare", prepare)
    a, b = pair(123, 77, 55, torch.float16)
    assert_product(tritile.matmul(a, b), a, b)
    assert len(set(refused)) == 2


def test_gradients_into_out_are_refused_on_a_first_and_on_a_later_call():
    a, b = pair(33, 35, 37, torch.float32)
    out = torch.empty(33, 35, device="cuda")
    tritile.matmul(a, b)
    tritile.matmul(a, b, out=out)
    wanting = a.clone().requires_grad_()
    for args, kwargs in (((wanting, b), {"out": out}), ((a, b), {"out": out.clone().requires_grad_()})):
        with pytest.raises(GradientError, match="no_grad"):
            tritile.matmul(*args, **kwargs)
    with torch.no_grad():
        assert_product(tritile.matmul(wanting, b), a, b)
    assert tritile.matmul(wanting, b).requires_grad  # what was met without a gradient is not taken for it


def test_wrong_arguments_on_a_gpu_raise_our_errors():
    a, b = pair(33, 33, 33, torch.float32)
    out = tritile.matmul(a, b)
    wrong = [
        ((a, b.to_sparse()), {}),
        ((a, b.cpu()), {}),
        ((a, b.half()), {}),
        ((a, b[:5]), {}),
        ((a, b), {"out": "out"}),
        ((a, b), {"out": out.to_sparse()}),
        ((a, b), {"out": out.cpu()}),
        ((a, b), {"out": a}),
        ((a, b), {"out": out[:1].expand(33, 33)}),
        ((a, b), {"precision": ["ieee"]}),
        ((a, b), {"out_dtype": "float16"}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(TritileError):
            tritile.matmul(*args, **kwargs)
    tritile.matmul(a, b, out=out)
    with pytest.raises(TritileError):  # shaped as on a call before, in memory that overlaps
        tritile.matmul(out, b, out=out)


def test_lazily_negated_input():
    z = torch.complex(gpu((33, 35), torch.float32), gpu((33, 35), torch.float32, 1))
    b = gpu((35, 37), torch.float32, 2)
    for a in (z.conj().imag, z.imag, z.conj().imag):  # one memory, negated and not
        assert_product(tritile.matmul(a, b), a.resolve_neg(), b)


@pytest.mark.serial
def test_a_sum_as_long_as_32_bits_count():
    k = 2**31 - 1
    a = torch.ones(1, k, dtype=torch.int8, device="cuda")
    assert tritile.matmul(a, a.mT).item() == k


@pytest.mark.serial
def test_a_batch_longer_than_32_bits_count():
    batch = 2**31 + 5
    a = torch.ones(batch, 1, 1, dtype=torch.int8, device="cuda")
    a[-1] = 3
    out = tritile.matmul(a, a)
    assert out[-1].item() == 9
    assert bool((out[:-1] == 1).all())
