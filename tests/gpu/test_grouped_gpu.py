"""Products of groups on a GPU: both kernels, every grouping, dtype, layout and kind of offsets."""

import pytest
import torch

import tritile
from tests.configs import of_groups, tile
from tests.groups import assert_groups, operands, parts, shape_of, spoiled
from tests.launched import captured
from tests.launched import launched as made
from tests.reference import bytes_of, frame, guard_intact, placed, values
from tritile.core import device as devices
from tritile.lab import baselines
from tritile.ops.grouped import Operands, described
from tritile.planning import model
from tritile.runtime import launch
from tritile.tune.subject import answers
from tritile.tune.subject.operands import copies_of
from tritile.tune.suites import parse_shape

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
RAGGED = ("rows", "columns", "k")
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


def launched(config, a, b, offs, out, precision="ieee", scales=(None, None)):
    """The products, by a config or by the model's first choice."""
    call = described(Operands(a, b, offs, *scales), out, precision)
    made(call, config or model.pick(call.problem, devices.gpu(0)))
    return out


def run(config, a, b, offs):
    """Into a frame of poison that nothing may touch but the result; the result's bits."""
    buffer, out = frame(shape_of(a, b, offs), a.dtype, "row", "cuda")
    launched(config, a, b, offs, out)
    assert_groups(out, a, b, offs)
    made = bytes_of(out)
    assert guard_intact(buffer, out)
    return made


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("ragged", RAGGED)
def test_offsets(ragged, config):
    """Columns of b, and K that is contiguous, begin anywhere, and not on 16 bytes, for TMA too."""
    for kind in ENDS:
        offs = ends(kind)
        a, b = posed(ragged, offs, torch.bfloat16)
        spoiled(a, b, offs, ragged, 600)
        first = run(config, a, b, offs)
        assert torch.equal(first, run(config, a, b, offs)), kind


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("a_layout", ["row", "column"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("ragged", [*RAGGED, "none"])
def test_layouts(ragged, a_layout, b_layout, config):
    """An infinity of a group must not come into the last block of K of the one before it."""
    offs = ends("uneven") if ragged != "none" else None
    sizes = EVEN.get(ragged, (136, 264, 600))
    a, b = (placed(x, layout) for x, layout in zip(
        operands(ragged, 5, sizes, torch.float16, "cuda"), (a_layout, b_layout), strict=True
    ))  # fmt: skip
    run(config, a, b, offs)
    if ragged == "k":
        b[201] = float("inf")  # of the last group
        out = launched(config, a, b, offs, torch.empty(shape_of(a, b, offs), dtype=a.dtype, device="cuda"))
        assert out[:4].isfinite().all()
        assert not out[4].isfinite().any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("ragged", RAGGED)
def test_the_operation_on_any_strides(ragged, sizes, layout):
    """Each grouping and layout in two of three dtypes, one for each kind of size."""
    turn = RAGGED.index(ragged) + LAYOUTS.index(layout) + (sizes is ODD)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[turn % 3]
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
@pytest.mark.parametrize("ragged", [*RAGGED, "none"])
def test_precisions(ragged, precision):
    offs = ends("uneven") if ragged != "none" else None
    a, b = operands(ragged, 5, EVEN.get(ragged, (100, 72, 200)), torch.float32, "cuda")
    out = tritile.grouped_matmul(a, b, offs, precision=precision)
    assert_groups(out, a, b, offs, precision)


@pytest.mark.parametrize("precision", ["ieee", "fast"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("config", [None, CONFIGS[1], *CONFIGS[3:5]], ids=str)
@pytest.mark.parametrize("ragged", ["rows", "k", "none"])
def test_fp8_with_scales(ragged, config, dtype, precision):
    """Scales are powers of two, whose rounding nothing shows: the result is that without, scaled after.

    Sums left to Hopper's tensor cores keep 13 bits after the first at each instruction, of 32 of K.
    """
    offs, groups = ends("a rest") if ragged != "none" else None, 4
    sizes = {"rows": (600, 272, 144), "k": (144, 272, 600), "none": (144, 272, 608)}[ragged]
    a, b = operands(ragged, groups, sizes, dtype, "cuda")
    b = placed(b, "column")
    m, n = a.shape[-2], b.shape[-1]
    of_a = {"rows": (m,), "k": (groups * m,), "none": (groups, m)}[ragged]
    of_b = {"rows": (groups, n), "k": (groups * n,), "none": (groups, n)}[ragged]
    scale_a, scale_b = (
        torch.exp2(values(shape, torch.float32, i, "cuda").round()) for i, shape in enumerate((of_a, of_b))
    )
    empty = torch.empty(shape_of(a, b, offs), device="cuda")
    plain = launched(config, a, b, offs, empty.clone(), precision)
    if precision == "ieee":
        assert_groups(plain, a, b, offs)
    for got, of_group, matrix in parts(a, b, offs, plain)[0]:
        error = (got.double() - of_group.double() @ matrix.double()).abs()
        magnitude = of_group.double().abs() @ matrix.double().abs()
        assert (error <= (of_group.shape[1] / 32 + 1) * 2.0**-13 * magnitude).all()
    scaled = launched(config, a, b, offs, empty.clone(), precision, (scale_a, scale_b))
    by_column = scale_b.view(groups, 1, n)
    if ragged == "rows":
        for g, (got, *_) in enumerate(parts(a, b, offs, plain)[0]):
            got *= by_column[g]
        assert torch.equal(scaled, plain * scale_a[:, None])
    else:
        assert torch.equal(scaled, plain * scale_a.view(groups, m, 1) * by_column)


@pytest.mark.parametrize("groups", [1, 33, 128, 512, 1024])
@pytest.mark.parametrize("ragged", ["rows", "k"])
def test_many_groups(ragged, groups):
    generator = torch.Generator().manual_seed(groups)
    cuts = torch.randint(0, 4097, (groups,), generator=generator).sort().values.int().cuda()
    sizes = {"rows": (4096, 128, 64), "k": (64, 128, 4096)}[ragged]
    a, b = operands(ragged, groups, sizes, torch.bfloat16, "cuda")
    a = placed(a, "column") if ragged == "k" else a
    assert_groups(tritile.grouped_matmul(a, b, cuts), a, b, cuts)
    for config in CONFIGS[1::2]:
        run(config, a, b, cuts)


@pytest.mark.parametrize("load", ["even", "skewed", "sparse"])
@pytest.mark.parametrize("text", ["8x4096x1024x2048", "64x8192x1536x512"])
def test_answers_of_the_model_and_of_torch(text, load):
    """The suite's kind of problem, checked as the tuner checks, and by torch's own."""
    from tritile.tune.subject.operands import shared

    problem = parse_shape(text, "grouped", layout="NT").problem
    (call,) = copies_of(problem, devices.gpu(0), 1)
    shared(call, load)
    for family in model.families(problem, devices.gpu(0)):
        for config in model.ranked(problem, devices.gpu(0), family)[:3]:
            answers.check(lambda call, c=config: launch.prepare(call, c)(*call.tensors), call)
    if torch.cuda.get_device_capability() == (9, 0) and hasattr(torch, "_grouped_mm"):
        (way,) = baselines.torch_ways(call).values()
        answers.check(baselines.into_out(way), call, every=False)


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


def test_calls_met_again():
    """The same launch with other tensors; another shape, offs of another length, is another call."""
    offs = ends("uneven")
    for seed in range(3):
        for ragged in RAGGED:
            a, b = posed(ragged, offs, torch.bfloat16)
            a += seed
            assert_groups(tritile.grouped_matmul(a, b, offs), a, b, offs)
    a, b = posed("k", offs[:3], torch.bfloat16)
    assert tritile.grouped_matmul(a, b, offs[:3]).shape == (3, 136, 264)
    out = torch.empty(600, 264, device="cuda", dtype=torch.bfloat16)
    a, b = posed("rows", offs, torch.bfloat16)
    for _ in range(2):
        version = out._version
        tritile.grouped_matmul(a, b, offs, out=out)
        assert out._version > version
        with pytest.raises(tritile.errors.OverlapError):
            tritile.grouped_matmul(a, b, offs, out=torch.as_strided(b, (600, 264), (264, 1)))


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
