"""Products of groups on a GPU: both kernels, every grouping, dtype, layout and kind of offsets."""

import itertools

import pytest
import torch

import tritile
from tests.configs import of_groups, tile
from tests.groups import assert_groups, operands, shape_of, spoiled
from tests.launched import captured, launched, replayed
from tests.reference import bytes_of, frame, guard_intact, name, placed, values
from tritile.choose import aten, waves
from tritile.core import device as devices
from tritile.families import launching
from tritile.families.space import illegal
from tritile.lab import baselines
from tritile.ops import memo
from tritile.ops import request as ops_request
from tritile.ops.grouped import grouped_call
from tritile.tune.subject import answers
from tritile.tune.subject.operands import copies_of
from tritile.tune.suites import parse_shape

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
RAGGED = ("rows", "columns")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("row", "column", "sliced", "column_sliced", "sparse", "offset")
# 16-byte rows, which descriptors want, and others; the shared size is larger than a tile of rows or of K.
EVEN = {"rows": (600, 264, 136), "columns": (264, 600, 136), "k": (136, 264, 600)}
ODD = {"rows": (601, 137, 75), "columns": (137, 601, 75), "k": (75, 137, 601)}
ENDS = {
    "uneven": [7, 7, 200, 201, 600],
    "a rest": [0, 129, 129, 431],
    "decreasing": [300, 10, 350, 20],
    "out of range": [-5, 90, 2**31 - 1, 400],
    "all empty": [0, 0],
}


CONFIGS = [
    tile(16, 32, 64),
    tile(64, 128, 32),
    of_groups(16, 64, 128, persistent=False),
    of_groups(64, 128, 64),
    of_groups(64, 64, 64, persistent=False),
    of_groups(128, 256, 64, 8, 3, subtiles=2),
]


def ends(kind):
    return torch.tensor(ENDS[kind], dtype=torch.int32, device="cuda")


def posed(ragged, offs, dtype, sizes=EVEN):
    return operands(ragged, len(offs), sizes[ragged], dtype, "cuda")


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has these on Hopper alone")


def run(config, a, b, offs):
    """Into a frame of poison that nothing may touch but the result; the result's bits."""
    buffer, out = frame(shape_of(a, b, offs), a.dtype, "row", "cuda")
    launched(grouped_call(a, b, offs, None, None, out, "ieee"), config)
    assert_groups(out, a, b, offs)
    made = bytes_of(out)
    assert guard_intact(buffer, out)
    return made


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("ragged", RAGGED)
def test_offsets(ragged, config):
    """Columns of b begin anywhere, and not on 16 bytes, for TMA too."""
    for kind in ENDS:
        offs = ends(kind)
        a, b = posed(ragged, offs, torch.bfloat16)
        spoiled(a, b, offs, ragged, 600)
        first = run(config, a, b, offs)
        assert torch.equal(first, run(config, a, b, offs)), kind


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("ragged", RAGGED)
def test_layouts_and_ragged_sizes(ragged, dtype, config):
    """Rows start on 16 bytes and end at every residue modulo 16 bytes, or lie in any way."""
    padded, precision, ran = ("padded", "padded"), "tf32" if dtype == torch.float32 else "ieee", 0
    residues = range(16 // dtype.itemsize)
    sizes = [(3, 1, 65), (3, 7, 72), *((129 + r % 2, 128 + r, 72 + 5 * (r % 2)) for r in residues)]
    cases = [(size, padded, "padded") for size in sizes]
    cases += [((133, 131, 77), padded, layout) for layout in ("column_padded", "sliced", "offset")]
    cases += [(EVEN[ragged], layouts, "row") for layouts in itertools.product(("row", "column"), repeat=2)]
    for (m, n, k), layouts, layout in cases:
        shared = m if ragged == "rows" else n
        offs = torch.tensor([shared // 3, shared // 3, shared], dtype=torch.int32, device="cuda")
        a, b = map(placed, operands(ragged, 3, (m, n, k), dtype, "cuda"), layouts)
        buffer, out = frame((m, n), dtype, layout, "cuda")
        call = grouped_call(a, b, offs, None, None, out, precision)
        if illegal(config, call.problem, devices.gpu(0)) is None:
            launching.prepare(call, config)(*call.tensors)
            assert_groups(out, a, b, offs, precision)
            assert guard_intact(buffer, out), (m, n, k, layouts, layout)
            ran += 1
    if not ran:
        pytest.skip("illegal for this type on this GPU")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("ragged", [*RAGGED, "k"])
def test_the_operation_on_any_strides(ragged, sizes, layout):
    """Each grouping and layout in two of three dtypes, one for each kind of size."""
    turn = ["rows", "columns", "k"].index(ragged) + LAYOUTS.index(layout) + (sizes is ODD)
    dtype = DTYPES[turn % 3]
    offs = ends("a rest")
    a, b = (placed(x, layout) for x in posed(ragged, offs, dtype, sizes))
    out = tritile.grouped_matmul(a, b, offs)
    assert out.is_contiguous()
    assert_groups(out, a, b, offs)
    buffer, given = frame(tuple(out.shape), dtype, layout, "cuda")
    assert tritile.grouped_matmul(a, b, offs, out=given) is given
    assert_groups(given, a, b, offs)
    assert guard_intact(buffer, given)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("ragged", [*RAGGED, "k", "none"])
def test_precisions(ragged, precision):
    offs = ends("uneven") if ragged != "none" else None
    a, b = operands(ragged, 5, EVEN.get(ragged, (100, 72, 200)), torch.float32, "cuda")
    out = tritile.grouped_matmul(a, b, offs, precision=precision)
    assert_groups(out, a, b, offs, precision)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("ragged", [*RAGGED, "none"])
def test_fp8_by_torch(ragged, kind, scaled):
    """Scales are powers of two, whose rounding nothing shows, and NaN where no group reads them."""
    on_hopper()
    offs, groups = (ends(kind), len(ENDS[kind])) if ragged != "none" else (None, 5)
    sizes = {"rows": (600, 272, 144), "columns": (272, 600, 144), "none": (100, 272, 144)}[ragged]
    a, b = operands(ragged, groups, sizes, torch.float8_e4m3fn, "cuda")
    if offs is not None:
        spoiled(a, b, offs, ragged, 600)
    b, wide = placed(b, "column"), (a.float(), b.float())
    scales = {}
    if scaled:
        shapes = a.shape[:-1], (*b.shape[:-2], b.shape[-1])
        of_a, of_b = (torch.exp2(values(s, torch.float32, i, "cuda").round()) for i, s in enumerate(shapes))
        wide = wide[0] * of_a.unsqueeze(-1), wide[1] * of_b.unsqueeze(-2)
        scales = {"scale_a": of_a, "scale_b": of_b}
        if offs is not None:
            (of_a if ragged == "rows" else of_b)[max(0, *ENDS[kind]) :] = float("nan")
    with tritile.mode(backends="triton,aten"):
        if not scaled and ragged == "none":  # a plain batch
            assert_groups(tritile.grouped_matmul(a, b), *wide, None, fp8=True)
            return
        buffer, out = frame(shape_of(a, b, offs), torch.bfloat16, "column_sliced", "cuda")
        for given in (None, None, out, out):
            got = tritile.grouped_matmul(a, b, offs, out=given, **scales)
            assert got.dtype == torch.bfloat16
            assert given is not None or got.is_contiguous()
            assert_groups(got, *wide, offs, fp8=True)
        fast = tritile.grouped_matmul(a, b, offs, precision="fast", **scales)
        assert (fast - got).float().norm() <= 1e-2 * got.float().norm()
        assert guard_intact(buffer, out)
        assert_groups(replayed(lambda: tritile.grouped_matmul(a, b, offs, **scales)), *wide, offs, fp8=True)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("sizes", [(136, 264, 600), (75, 137, 600), (1, 8, 600), (8, 1, 600)], ids=str)
def test_groups_that_share_k(sizes, dtype, kind):
    """By torch in one launch of bfloat16, else group by group; none reads what belongs to another."""
    offs = ends(kind)
    a, b = operands("k", len(offs), sizes, dtype, "cuda")
    spoiled(a, b, offs, "k", 600)
    for backends in ("triton", "triton,aten"):
        with tritile.mode(backends=backends):
            for layout in ("row", "column", "offset"):
                got = tritile.grouped_matmul(placed(a, layout), b, offs)
                assert got.is_contiguous()
                assert_groups(got, a, b, offs)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() == (9, 0):
        with tritile.mode(backends="triton,aten"):
            graph, out = captured(lambda: tritile.grouped_matmul(a, b, offs))
        for new in (ENDS[kind], [0, *ENDS[kind][:-1]]):
            offs.copy_(torch.tensor(new, dtype=torch.int32))
            a, b = a.nan_to_num_(0.5, 0.5), b.nan_to_num_(0.5, 0.5, 0.5)
            graph.replay()
            assert_groups(out, a, b, offs)
    else:
        torch.cuda.synchronize()
        with pytest.raises(tritile.errors.UnsupportedError, match="while a CUDA graph is captured"):
            captured(lambda: tritile.grouped_matmul(a, b, offs))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
def test_gradients(sizes, ragged, dtype):
    """Zero for an empty group, and for what belongs to none."""
    offs = torch.tensor([0, 129, 129, 431], dtype=torch.int32, device="cuda")
    a, b = (x.requires_grad_() for x in posed(ragged, offs, dtype, sizes))
    for backends in ("triton", "triton,aten"):
        with tritile.mode(backends=backends):
            a.grad = b.grad = None
            out = tritile.grouped_matmul(a, b, offs)
            g = values(tuple(out.shape), dtype, 5, "cuda")
            out.backward(g)
        assert_groups(a.grad, g, b.detach().mT, offs)
        assert_groups(b.grad, a.detach().mT, g, offs)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("b_layout", ["row", "column"])
def test_torch_bfloat16_as_tritile(monkeypatch, b_layout, kind):
    """Where a table, or what was measured, has torch's kernel make it: what belongs to no group is zero."""
    on_hopper()
    monkeypatch.setattr(ops_request, "is_by_aten", lambda problem, index: aten.illegal(problem) is None)
    offs = ends(kind)
    a, b = posed("rows", offs, torch.bfloat16)
    spoiled(a, b, offs, "rows", 600)
    b = placed(b, b_layout)
    tritile.forget()
    with tritile.mode(backends="triton,aten"):
        for _ in range(2):
            assert_groups(tritile.grouped_matmul(a, b, offs), a, b, offs)
        assert_groups(replayed(lambda: tritile.grouped_matmul(a, b, offs)), a, b, offs)
    (ready,) = (each for known in memo.CALLS.values() for each in known)
    assert ready.by_torch


@pytest.mark.parametrize("groups", [1, 33, 128, 512, 1024])
def test_many_groups(groups):
    generator = torch.Generator().manual_seed(groups)
    cuts = torch.randint(0, 4097, (groups,), generator=generator).sort().values.int().cuda()
    a, b = operands("rows", groups, (4096, 128, 64), torch.bfloat16, "cuda")
    assert_groups(tritile.grouped_matmul(a, b, cuts), a, b, cuts)
    for config in CONFIGS[1::2]:
        run(config, a, b, cuts)


@pytest.mark.parametrize("load", ["even", "skewed", "sparse"])
@pytest.mark.parametrize("text", ["8x4096x1024x2048", "64x8192x1536x512"])
def test_answers_of_model_and_torch(text, load):
    """The suite's kind of problem, checked as the tuner checks, and by torch's own."""
    from tritile.tune.subject.operands import with_group_ends

    problem = parse_shape(text, "grouped", layout="NT").problem
    (call,) = copies_of(problem, devices.gpu(0), 1)
    with_group_ends(call, load)
    for family in waves.families(problem, devices.gpu(0)):
        for config in waves.ranked(problem, devices.gpu(0), family)[:3]:
            answers.check(lambda call, c=config: launching.prepare(call, c)(*call.tensors), call)
    if torch.cuda.get_device_capability() == (9, 0) and hasattr(torch, "_grouped_mm"):
        (baseline,) = baselines.torch_baselines(call).values()
        answers.check(baselines.into_out(baseline), call, every=False)


def test_a_graph_reads_offsets_anew():
    """Nothing of where groups end is known to the host: a replay follows what is written there."""
    offs = torch.tensor([100, 200, 600], dtype=torch.int32, device="cuda")
    a, b = posed("rows", offs, torch.bfloat16)
    tritile.grouped_matmul(a, b, offs)
    graph, out = captured(lambda: tritile.grouped_matmul(a, b, offs))
    for new in ([100, 200, 600], [0, 600, 600], [5, 6, 7], [600, 1, 2], [-1, -1, -1]):
        offs.copy_(torch.tensor(new, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        assert_groups(out, a, b, offs)


def test_it_never_waits_for_the_gpu():
    offs = ends("uneven")
    a, b = posed("rows", offs, torch.bfloat16)
    tritile.grouped_matmul(a, b, offs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tritile.grouped_matmul(a, b, offs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
