"""Every family of products on a GPU: tests.cases.families at full sizes, every type, and how launches behave.

Around results lies poison, which has to stay; around operands lies NaN, which must not be read. Rows start on
16 bytes and end at every residue modulo 16 bytes, or start anywhere.
"""

import ctypes
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

import tritile
from tests.cases.families import *  # noqa: F403
from tests.configs import HAS_PAIRS, ON_GPU, pair, split, tile, tma, warpgroups
from tests.launched import captured, in_threads, launched, replayed
from tests.reference import FP8, assert_product, bytes_of, frame, guard_intact, placed, product64, values
from tests.simulated import rounded_to_tf32
from tritile.choose import waves
from tritile.core import device as devices
from tritile.core.problem import MatmulProblem
from tritile.families import launching
from tritile.families.space import illegal
from tritile.ops.products import matmul_call
from tritile.tune.subject import answers, operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
# Each family with one, two and three consumers, persistent or not, stored at once and by halves, with sides
# that are powers of two and not.
CONFIGS = [
    *ON_GPU,
    tma(128, 256, 64, 8, 3, persistent=True, subtiles=2),
    tma(16, 64, 128, 4, 4),
    tma(16, 16, 64, 2, 5, split=4),
    warpgroups(64, 16, 64, 1, 8),
    warpgroups(128, 128, 64, 1, 3, persistent=True),
    warpgroups(192, 160, 64, 3, 3),
    warpgroups(256, 144, 64, 2, 3, persistent=True, subtiles=2),
    split(64, 64, 1, 4),
    split(192, 80, 3, 4),
    split(128, 256, 2, 3, subtiles=2),
]
if HAS_PAIRS:
    CONFIGS += [
        pair(128, 192, 2, 3, persistent=True),
        pair(128, 128, 1, 4),
        pair(256, 144, 2, 3, persistent=True, subtiles=2),
        pair(64, 256, 1, 3, persistent=True),
    ]
SPLIT, PAIRS = (
    [config for config in CONFIGS if option in dict(config.kwargs)] for option in ("SPLIT_TAIL", "PAIR")
)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
some_configs = pytest.mark.parametrize("config", ON_GPU, ids=str)


def gpu(shape, dtype=BF16, seed=0):
    return values(tuple(shape), dtype, seed, "cuda")


KINDS = [
    *((dtype, "ieee", out) for dtype in (BF16, FP16) for out in (dtype, FP32)),
    (FP32, "tf32", FP32),
    (INT8, "ieee", torch.int32),
    *((dtype, "ieee", out) for dtype in FP8 for out in (BF16, FP32)),
]


def residues(itemsize):
    """(m, n, k) whose n ends at every residue modulo 16 bytes, beyond a tile and short of one."""
    for residue in range(max(1, 16 // itemsize)):
        yield 129 + residue % 2, 128 + residue, 72 + 5 * (residue % 2)
    yield 3, 1, 65
    yield 3, 7, 72


def cases(dtype, out_dtype):
    """Batch, M, N and K; how operands lie, and how the result does."""
    padded = ("padded", "column_padded" if dtype in FP8 else "padded")
    for size in residues(out_dtype.itemsize):
        yield (), size, padded, "padded"
    for layout in ("column_padded", "sliced", "offset"):
        yield (), (133, 131, 77), padded, layout
    for layout in ("padded", "column_padded"):
        yield (2,), (133, 131, 77), padded, layout
    if dtype != BF16:
        return
    for layouts in itertools.product(("row", "column"), repeat=2):  # read where they lie
        yield (), (256, 320, 512), layouts, "row"
    for layouts in (("column", "row"), ("sparse", "strided")):  # copied, which makes rows of them all
        yield (), (301, 203, 517), layouts, "row"
    for layouts in (("row", "column"), ("offset", "offset")):  # one tile of rows, many of columns
        yield (), (77, 515, 259), layouts, "row"


@pytest.mark.parametrize(
    ("config", "kind"),
    [*itertools.product(ON_GPU, KINDS), *((config, KINDS[0]) for config in CONFIGS[len(ON_GPU) :])],
    ids=str,
)
def test_types_layouts_and_ragged_sizes(config, kind):
    (dtype, precision, out_dtype), ran = kind, 0
    for batch, (m, n, k), (of_a, of_b), layout in cases(dtype, out_dtype):
        a, b = placed(gpu((*batch, m, k), dtype), of_a), placed(gpu((*batch, k, n), dtype, 1), of_b)
        buffer, out = frame((*batch, m, n), out_dtype, layout, "cuda")
        call = matmul_call(a, b, out, precision)
        if illegal(config, call.problem, devices.gpu(0)) is None:
            launching.prepare(call, config)(*call.tensors)
            assert_product(out, a, b, precision)
            assert guard_intact(buffer, out), (batch, m, n, k, of_a, of_b, layout)
            ran += 1
    if not ran:
        pytest.skip("illegal for this type on this GPU")


TF32_CONFIGS = [
    None,
    tile(64, 64, 32),
    tile(32, 32, 32),
    tma(64, 64, 64, 4, 3),
    tma(128, 128, 64, 8, 3, persistent=True),
    tma(128, 256, 32, 8, 4),
    tma(64, 64, 64, 4, 3, split=2),
    tma(16, 64, 64, 4, 3),
]
TF32_LAYOUTS = [
    ("row", "row"),
    ("row", "column"),
    ("column", "row"),
    ("offset", "sliced"),
    ("offset", "column"),
]


@pytest.mark.parametrize("layouts", TF32_LAYOUTS, ids=str)
@pytest.mark.parametrize("config", TF32_CONFIGS, ids=str)
@pytest.mark.parametrize("size", [(200, 140, 333), (600, 777, 333)], ids=str)  # copies have K contiguous
def test_tf32_operands_rounded_by_launchers(size, config, layouts):
    """As of rounded operands, but for sums: these err by less than cutting the operands would."""
    m, n, k = size
    a, b = placed(gpu((m, k), FP32), layouts[0]), placed(gpu((k, n), FP32, 1), layouts[1])
    out = torch.full((m, n), math.nan, device="cuda")
    call = matmul_call(a, b, out, "tf32")
    run = launched(call, config or waves.pick(call.problem, devices.gpu(0)))
    left, right = rounded_to_tf32(a), rounded_to_tf32(b)
    rounded, exact = product64(left, right), product64(a, b)
    # tensor cores cut each sum of at least 4 of K
    bound = 2.0**-23 * (k / 4 + 2) * product64(left.abs(), right.abs())
    for native in (True, False):
        if not native:
            run._steps = list(run._triton)
            out.fill_(math.nan)
            run(*call.tensors)
        assert bool(((out.double() - rounded).abs() <= bound).all())
        wanted = float((rounded - exact).norm())
        assert float((out.double() - exact).norm()) == pytest.approx(wanted, rel=0.05)


# Launches.


def prepared_call(config, m, n, k):
    """A launch, its call and what it wrote, which is right."""
    a, b, out = gpu((m, k)), gpu((k, n), seed=1), torch.empty(m, n, dtype=BF16, device="cuda")
    call = matmul_call(a, b, out, "ieee")
    prepared = launched(call, config)
    assert_product(out, a, b)
    torch.cuda.synchronize()
    return prepared, call, out


@every_config
def test_graphs_replay_on_any_stream(config):
    prepared, call, out = prepared_call(config, 131, 97, 611)
    wanted, outs, graphs = out.clone(), [torch.empty_like(out) for _ in range(2)], []
    for own in outs:
        graph, _ = captured(lambda own=own: [prepared(*call.tensors[:2], own) for _ in range(3)])
        graphs.append(graph)
    for got in (out, *outs):
        got.fill_(math.nan)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        graphs[0].replay()
        with torch.cuda.stream(side):
            graphs[1].replay()
        prepared(*call.tensors)
    torch.cuda.synchronize()
    for got in (out, *outs):
        assert torch.equal(bytes_of(got), bytes_of(wanted))


@every_config
def test_stream_with_reused_handle(config):
    """Both are the same stream to whoever goes by handles, and run side by side."""
    prepared, call, out = prepared_call(config, 131, 97, 611)
    runtime, outs = torch.cuda.cudart(), [torch.full_like(out, math.nan) for _ in range(16)]
    torch.cuda.synchronize()
    for own in outs:
        handle = ctypes.c_size_t()
        assert int(runtime.cudaStreamCreate(ctypes.addressof(handle))) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            torch.cuda._sleep(100_000)
            prepared(*call.tensors[:2], own)
        assert int(runtime.cudaStreamDestroy(handle.value)) == 0
    torch.cuda.synchronize()
    for got in outs:
        assert torch.equal(bytes_of(got), bytes_of(out))


@every_config
def test_launch_after_failed_launch(config, monkeypatch):
    prepared, call, out = prepared_call(config, 131, 97, 611)
    wanted = bytes_of(out)

    def fail(*_):
        raise RuntimeError("the driver refuses")

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "_steps", [*prepared._steps[:-1], fail])
        with pytest.raises(RuntimeError, match="the driver refuses"):
            prepared(*call.tensors)
    out.fill_(math.nan)
    prepared(*call.tensors)
    assert torch.equal(bytes_of(out), wanted)


@every_config
def test_threads_new_to_gpu_launch(config):
    """A new thread has no context of the driver, and without memory to ask for gets none by itself."""
    prepared, call, out = prepared_call(config, 517, 390, 1030)
    wanted, other = bytes_of(out), torch.zeros_like(out)
    torch.cuda.synchronize()
    in_threads(lambda: prepared(*call.tensors[:2], other))
    assert torch.equal(bytes_of(other), wanted)

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [torch.empty_like(out) for _ in range(30)]
            for got in outs:
                prepared(*call.tensors[:2], got)
            torch.cuda.current_stream().synchronize()
            assert all(torch.equal(bytes_of(got), wanted) for got in outs)

    in_threads(*[work] * 6)


@some_configs
def test_chain_waits_for_reads(config):
    """Each may start before the one ahead of it is done, whose result it reads, as its residual too."""
    x, weight = gpu((256, 256)) / 16, gpu((256, 256), seed=1) / 16
    outs = [torch.empty(256, 256, dtype=BF16, device="cuda") for _ in range(12)]
    call = matmul_call(x, weight, outs[0], "ieee", residual=x, activation="silu")
    prepared = launched(call, config)
    other = weight.clone()  # at another address than it was prepared with, as all that follows
    torch.cuda.synchronize()
    for before, after in itertools.pairwise(outs):
        prepared(before, other, after, before)
    for before, after in itertools.pairwise(outs):
        alone, copy = torch.empty_like(after), before.clone()
        torch.cuda.synchronize()
        prepared(copy, weight, alone, copy)
        assert torch.equal(bytes_of(alone), bytes_of(after))


@pytest.mark.parametrize("polls", [1, 64])
@pytest.mark.parametrize(
    ("size", "config"),
    [
        ((150, 130), tma(64, 64, 64, 4, 4, split=2)),
        ((150, 130), tma(64, 64, 64, 4, 4, split=8)),
        ((64, 100), tma(128, 128, 64, 4, 4, split=64)),
        ((15, 13), tma(16, 16, 64, 1, 5, split=128)),
    ],
    ids=str,
)
def test_shared_k_repeats_its_bits(monkeypatch, size, config, polls):
    a, b = gpu((size[0], 64 * 128)), gpu((64 * 128, size[1]), seed=1)
    wanted = None
    for looks in (polls, polls, 0):
        monkeypatch.setattr("tritile.families.common.grids.POLLS", looks)
        out = torch.empty(size, dtype=a.dtype, device="cuda")
        call = matmul_call(a, b, out, "ieee")
        ready = launching.prepare(call, config)
        for _ in range(50):
            out.fill_(math.nan)
            ready(*call.tensors)
            wanted = bytes_of(out) if wanted is None else wanted
            assert torch.equal(bytes_of(out), wanted)
    assert_product(out, a, b)


@pytest.mark.parametrize("config", SPLIT, ids=str)
@pytest.mark.parametrize(
    "size",
    [
        (100, 200, 16000),
        (1500, 1400, 1000),
        (2300, 1000, 515),
        (64, 64, 70000),  # a tile in as many parts as there are SMs: most have one group of rows, or none
    ],
    ids=str,
)
def test_split_tails_repeat_their_bits(config, size):
    """Whole tiles and parts, one wave and several: parts are summed in one order, whoever sums them."""
    m, n, k = size
    a, b = gpu((m, k)), gpu((n, k), seed=1).mT
    buffer, out = frame((m, n), BF16, "row", "cuda")
    call = matmul_call(a, b, out, "ieee")
    ready = launched(call, config)
    assert_product(out, a, b)
    wanted = bytes_of(out)
    for _ in range(30):
        out.fill_(math.nan)
        ready(*call.tensors)
        assert torch.equal(bytes_of(out), wanted)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("config", PAIRS, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["NN", "NT"])
@pytest.mark.parametrize(
    "size",
    [(1, 131, 64), (577, 1000, 72), (2100, 6120, 136), (300, 5003, 1032), (1800, 1700, 2048)],
    ids=str,
)
def test_pairs_have_single_programs_bits(config, turned, size):
    """Odd numbers of tiles, one wave and several, rows off sectors and ends off 16 bytes: 30 times."""
    m, n, k = size
    a, b = gpu((m, k)), gpu((n, k), seed=1).mT if turned else gpu((k, n), seed=1)
    buffer, out = frame((m, n), BF16, "row", "cuda")
    call, other = matmul_call(a, b, out, "ieee"), torch.empty(m, n, dtype=BF16, device="cuda")
    launched(matmul_call(a, b, other, "ieee"), warpgroups(128, 128, 64, 2, 3))
    ready, wanted = launched(call, config), bytes_of(other)
    assert_product(out, a, b)
    for _ in range(30):
        assert torch.equal(bytes_of(out), wanted)
        out.fill_(math.nan)
        ready(*call.tensors)
    assert torch.equal(bytes_of(out), wanted)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("config", [*PAIRS[::2], SPLIT[0]], ids=str)
def test_launches_beside_other_kernels(config):
    """On the same SMs, on other streams, and launched by Triton's own launcher."""
    ready, call, out = prepared_call(config, 1500, 1400, 1000)
    plain, _, other = prepared_call(warpgroups(128, 128, 64, 2, 3), 1500, 1400, 1000)
    wanted, apart, side = bytes_of(out), bytes_of(other), torch.cuda.Stream()
    torch.cuda.synchronize()
    for native in (True, False):
        if not native:
            ready._steps = ready._triton
        for _ in range(20):
            for got in (out, other):
                got.fill_(math.nan)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                plain(*call.tensors[:2], other)
            ready(*call.tensors)
            torch.cuda.synchronize()
            assert torch.equal(bytes_of(out), wanted)
            assert torch.equal(bytes_of(other), apart)


@pytest.mark.parametrize("config", [*SPLIT, *PAIRS], ids=str)
@pytest.mark.parametrize("size", [(520, 776, 1032), (2100, 1300, 200)], ids=str)
def test_early_launches_repeat_bits(config, size):
    """Each may start while the one ahead of it stores: nothing of that one is still in use."""
    ready, call, out = prepared_call(config, *size)
    wanted, outs = out.clone(), [torch.full_like(out, math.nan) for _ in range(8)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(250):
        for got in outs:
            ready(*call.tensors[:2], got)
        for got in outs:
            wrong += (got != wanted).sum()
            got.fill_(math.nan)
    assert int(wrong) == 0


@pytest.mark.parametrize("family", ["tile", "descriptor", "warpgroups"])
def test_a_capture_from_a_cold_plan(family, monkeypatch):
    a, b, original = gpu((192, 2056)), gpu((2056, 200), seed=1), waves.ranked
    torch.matmul(a, b)
    monkeypatch.setattr(waves, "pick", lambda problem, device: original(problem, device, family)[0])
    tritile.forget()
    with tritile.mode("off"):
        assert_product(replayed(lambda: tritile.matmul(a, b)), a, b)
        assert tritile.plan(tritile.matmul, a, b).config.family == family
    tritile.forget()


_CAPTURE_FIRST = """
import torch, tritile
a, b = (torch.randn(256, 8192, device="cuda").bfloat16() for _ in range(2))
torch.matmul(a, b.T)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = tritile.matmul(a, b.T)
ways = dict(tritile.plan(tritile.matmul, a, b.T).config.kwargs)
assert ways.get("SPLIT_K", 1) > 1 or "SPLIT_TAIL" in ways  # counters that the capture has to leave ready
for _ in range(3):
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    error = (out.double() - a.double() @ b.T.double()).norm() / out.double().norm()
    assert error < 1e-2, error
"""


def test_capture_as_first_use(tmp_path):
    env = dict(os.environ, TRITILE_CACHE_DIR=str(tmp_path), TRITILE_MODE="off")
    done = subprocess.run([sys.executable, "-c", _CAPTURE_FIRST], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


PROBLEMS = [
    {"epilogue": "bias=row residual=full gelu"},
    {"epilogue": "bias=full weighted silu", "batch": 3},
    {"epilogue": "gated silu"},
    {"epilogue": "bias=row bias_up=row gated gelu", "a_align": 2, "b_align": 2},
    {"dtype": "int8", "epilogue": "scale_a=column scale_b=row"},
    {"dtype": "float8_e4m3fn", "b_dtype": "float8_e5m2", "epilogue": "scale_a=one scale_b=row"},
    {"dtype": "float64", "out_dtype": "float64", "epilogue": "bias=row weighted gated silu"},
]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fields", PROBLEMS, ids=str)
def test_the_tuner_checks_answers(fields):
    common = {"batch": 1, "m": 208, "n": 272, "k": 336, "dtype": "bfloat16", "out_dtype": "bfloat16"}
    problem, device = MatmulProblem(**common | fields), devices.current_gpu()
    for config in waves.screened(problem, device, 6):
        call, memory = operands.guarded(problem)
        answers.check(operands.run_of(launching.prepare(call, config)), call)
        assert memory.is_intact()
    out = call.out.tensor
    out.view(-1)[0] += 2 * out.abs().max() + 1e4  # and a wrong one is told
    with pytest.raises(tritile.errors.TuningError, match="wrong answer"):
        answers.answer_error(call)
