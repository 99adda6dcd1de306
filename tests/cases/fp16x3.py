"""float32 products of float16 parts: interpreted at small sizes, on a GPU at full ones."""

import pytest
import torch

import tritile
from tests.configs import tile, tma, warpgroups
from tests.launched import DEVICE, INTERPRETED, launched
from tests.reference import bytes_of, frame, guard_intact, placed, product64, values
from tests.simulated import DATA, assert_bounded
from tritile.families.fp16x3.lowering import error_bound
from tritile.families.work import lowered
from tritile.ops.products import matmul_call
from tritile.runtime import launch

U = 2.0**-24


def posed(name, m, n, k, layouts=("row", "row")):
    a, b = (values(shape, torch.float32, seed, DEVICE) for seed, shape in enumerate(((m, k), (k, n))))
    a, b = DATA[name](a, b)
    return placed(a, layouts[0]), placed(b, layouts[1])


class Divided:
    """The parts, scales and verdict that the launches before the core leave."""

    def __init__(self, a, b):
        call = matmul_call(a, b, torch.empty(a.shape[0], b.shape[1], device=DEVICE), "fp16x3")
        parts = lowered(call, False)
        buffers = dict(zip(call.buffers, call.tensors, strict=True))
        for name, section in parts.scratch.items():
            buffers[name] = torch.empty(section.elements, dtype=getattr(torch, section.dtype), device=DEVICE)
        for step in parts.before:
            args = {name: launch._bound(value, buffers) for name, value in step.args.items()}
            options = {name: value for name, value in step.options.items() if name != "launch_pdl"}
            step.kernel[step.grid](**args, **options)
        core = parts.core
        self.verdict = int(buffers[core.fallback.flag.buffer])
        views = (core.a, core.b, core.sides["scale_a"], core.sides["scale_b"])
        self.a, self.b, self.a_scale, self.b_scale = (
            buffers[view.buffer].as_strided(view.shape, view.strides) for view in views
        )


if INTERPRETED:
    CONFIGS = [
        tile(16, 32, 32, group=2),
        tma(32, 16, 32, group=2),
        tma(32, 16, 32, group=2, persistent=True),
        tma(32, 16, 32, group=2, split=2),
    ]
    CORES = [(name, config) for name in ("normal", "graded") for config in CONFIGS]
    CORES += [("infinite", config) for config in CONFIGS[::2]]
    SIZES, LONG = [((37, 35, 150), ("row", "column"), "sliced")], (16, 8, 8192)
else:
    CONFIGS = [
        tile(128, 64, 32, 8, 3),
        tile(32, 64, 64, 4, 4, group=1),
        tma(64, 64, 64, 4, 4),
        tma(128, 128, 64, 8, 4, persistent=True),
        tma(64, 64, 64, 4, 4, split=4),
        warpgroups(64, 64, 64, 1, 4),
        warpgroups(128, 192, 64, 2, 3, persistent=True, subtiles=2),
        warpgroups(192, 96, 64, 3, 4),
        warpgroups(128, 160, 64, 2, 4, persistent=True),
        warpgroups(192, 128, 64, 3, 3, persistent=True),
    ]
    CORES = [(name, config) for name in ("normal", "uniform", "graded", "NaN") for config in CONFIGS]
    SIZES = [(size, ("row", "row"), "row") for size in ((256, 384, 2048), (201, 325, 1111))]
    LONG = (256, 384, 16384)


@pytest.mark.parametrize(("name", "config"), CORES, ids=str)
def test_families_make_core_or_leave_it(name, config):
    for size, layouts, layout in SIZES:
        a, b = posed(name, *size, layouts)
        buffer, out = frame(size[:2], torch.float32, layout, DEVICE)
        call = matmul_call(a, b, out, "fp16x3")
        run = launched(call, config)
        assert_bounded(out, a, b)
        if not INTERPRETED:
            first = bytes_of(out)
            run(*call.tensors)
            assert torch.equal(bytes_of(out), first)
        assert guard_intact(buffer, out)


@pytest.mark.parametrize("config", CONFIGS[:2] if INTERPRETED else CONFIGS, ids=str)
def test_errors_do_not_grow_with_k(config):
    """Without what rounding loses of totals, 256 sums of exact products are off by 2e-7 and more.

    On a GPU, whose products of blocks are not exact: 2.0e-7 at any K as simulated, 3.2e-7 without.
    """
    a, b = posed("uniform", *LONG)
    out = torch.full(LONG[:2], torch.nan, device=DEVICE)
    launched(matmul_call(a, b, out, "fp16x3"), config)
    exact = product64(a, b)
    assert float((out - exact).norm() / exact.norm()) < (1e-7 if INTERPRETED else 2.3e-7)


@pytest.mark.parametrize("name", ["normal", "graded", "NaN"])
def test_what_is_fused_follows_whichever_kernel(name):
    m, n, k = (20, 24, 100) if INTERPRETED else (200, 240, 1000)
    a, b = posed(name, m, n, k)
    residual = values((m, n), torch.float32, 3, DEVICE)
    got = tritile.addmm(residual, a, b, beta=0.5, alpha=-2.0, precision="fp16x3")
    wanted = 0.5 * residual.double() - 2.0 * product64(a, b)
    bound = 2 * error_bound(k) * product64(a.abs(), b.abs()) + 4 * U * (wanted.abs() + residual.abs())
    assert bool((((got.double() - wanted).abs() <= bound) | wanted.isnan()).all())
    assert torch.equal(got.isnan(), wanted.isnan())
