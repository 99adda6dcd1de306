"""`tritile.explain`: figures worked out by hand, what compiled kernels take, and bad input."""

import functools
import json
import logging
import math
from dataclasses import replace

import pytest
import torch

import tritile
import unseen
from tests.ahead import later
from tests.configs import pair, split, warpgroups
from tritile.choose import gpu_tables, waves
from tritile.choose.pick import Plan
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem, problem_from_dict
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.families.common.rates import peak_tflops
from tritile.families.work import work_of
from tritile.lab import explain as explaining
from tritile.lab import traffic
from tritile.lab.explain import config_like, occupancy, parts_us
from tritile.runtime.ahead import Resources
from tritile.tuner.store.trial import Trial

H200, A100, MI300 = map(target_device, ("nvidia-h200", "sm_80", "gfx942"))
SQUARE = MatmulProblem(1, 1024, 1024, 1024, "bfloat16", "bfloat16")
TILE = Config.of(family="tile", BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)
SLOW = Config.of(family="tile", BLOCK_M=32, BLOCK_N=32, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=3)
STACKS = pytest.mark.stacks
RANKED = functools.cache(waves.ranked)  # a second for a product


@pytest.fixture(autouse=True)
def _ranked_once(monkeypatch):
    monkeypatch.setattr(waves, "ranked", RANKED)


@pytest.fixture(scope="module")
def square():
    return tritile.explain(SQUARE, device=H200, config=TILE)


@pytest.fixture
def uncompiled(monkeypatch):
    def refuse(*_):
        raise TuningError("it does not compile")

    monkeypatch.setattr(explaining, "compiled_for", refuse)


def test_bytes_roofline_and_waves_by_hand(square):
    peak = 4096 * 132 * 1.98e9  # operations a clock of a multiprocessor, by their number and clock
    assert square.untiled.total == 1024**3 * 2 * 2 + 1024**2 * 2
    assert square.tiled.total == 2 * (8 * 1024**2 * 2) + 1024**2 * 2
    assert square.unique.total == 3 * 1024**2 * 2
    assert square.reuse == pytest.approx(square.untiled.total / square.tiled.total)
    assert square.peak_tflops == pytest.approx(peak / 1e12)
    assert square.intensity == 2 * 1024**3 / (3 * 1024**2 * 2)
    assert square.ridge == pytest.approx(peak / 4800e9)
    assert square.roof_us == pytest.approx(2 * 1024**3 / peak * 1e6)
    assert square.tiling == traffic.Tiling(tiles=64, programs=64, filled=1.0)
    assert (square.waves, square.idle) == (1, pytest.approx(1 - 64 / square.at_once))
    more = replace(square, tiling=traffic.Tiling(265, 265, 1.0), at_once=132)
    assert (more.waves, more.idle) == (3, pytest.approx(131 / 132))
    took = replace(square, predicted_us=8.0, measured_us=None)
    assert took.summary == (
        "64 programs on 132 SMs: 52% of the SMs idle; 8.0 us predicted; multiplying alone needs 2.0 us"
    )
    told = replace(more, measured_us=7.54).summary
    assert told.startswith("265 programs in 3 waves of 132: 99% of the last wave idle; 7.5 us measured")
    assert f"in short                {took.summary}\n" in repr(took)
    ragged = traffic.tiling(MatmulProblem(2, 129, 100, 65, "bfloat16", "bfloat16"), TILE, H200)
    assert (ragged.tiles, ragged.filled) == (4, pytest.approx(129 / 256 * 100 / 128 * 65 / 128))


def test_memory_bound_and_persistent(uncompiled):
    thin = tritile.explain(MatmulProblem(1, 1, 8192, 8192, "bfloat16", "bfloat16"), device=H200)
    assert thin.roof_us == pytest.approx(thin.unique.total / 4800e3)
    assert thin.bound == explaining.MEMORY
    config = config_like("warpgroups PERSISTENT=True", SQUARE, H200)
    assert tritile.explain(SQUARE, device=H200, config=config).at_once == 132


def test_split_tails_and_pairs_counted():
    """20 tiles of 6 parts each; 140, 8 of them of 16 parts; and 5 rows of tiles, which are 3 of pairs."""
    deep = MatmulProblem(1, 1244, 440, 29648, "bfloat16", "bfloat16")
    own, alone = split(256, 128, 2, 4), warpgroups(256, 128, 64, 2, 4, persistent=True)
    found, whole = (traffic.tiling(deep, each, H200) for each in (own, alone))
    assert (found.tiles, found.programs, found.partials) == (20, 120, 120 * 256 * 128 * 4)
    assert found.filled == whole.filled
    parts, unsplit = (parts_us(deep, each, H200)[explaining.TENSOR_CORES] for each in (own, alone))
    assert parts == pytest.approx(unsplit / 6)
    waves = replace(deep, m=256 * 35, n=512)
    assert traffic.tiling(waves, own, H200).programs == 132 + 8 * 16
    parts, unsplit = (parts_us(waves, each, H200)[explaining.TENSOR_CORES] for each in (own, alone))
    assert parts == pytest.approx(unsplit * (1 + 1 / 16) / 2)
    tall = replace(deep, m=128 * 5, n=1024)
    assert traffic.tiling(tall, pair(128, 256, 2, 4), H200).tiles == 6 * 4
    read = 29648 * 2 * (128 * 5 * 4 + 1024 * 3)
    assert traffic.tiled(tall, pair(128, 256, 2, 4), H200).read == read


def test_unknown_peak_roof_of_memory(uncompiled):
    unknown = replace(A100, name="Orin", arch=87)
    found = tritile.explain(SQUARE, device=unknown)
    assert (found.peak_tflops, found.ridge) == (None, None)
    assert found.roof_us == pytest.approx(found.unique.total / (unknown.memory_gbps * 1e3))
    assert "unknown" in repr(found)


@pytest.mark.parametrize(
    ("taken", "warps", "device", "programs", "limit"),
    [  # as NVIDIA's occupancy calculator has them
        (Resources(128, 0, 0), 4, H200, 4, "registers"),
        (Resources(96, 0, 0), 1, H200, 20, "registers"),
        (Resources(32, 0, 0), 8, H200, 8, "registers and warps"),
        (Resources(16, 0, 0), 1, H200, 32, "programs"),
        (Resources(32, 0, 0), 8, replace(H200, arch=103), 8, "registers and warps"),
        (Resources(16, 0, 0), 4, replace(H200, arch=75), 8, "warps"),
        (Resources(32, 0, 100_000), 4, H200, 2, "shared memory"),
        (Resources(33, 0, 0), 4, A100, 12, "registers"),
    ],
)
def test_occupancy(taken, warps, device, programs, limit):
    found = occupancy(taken, warps, device)
    assert (found.programs, found.warps, found.limit) == (programs, programs * warps, limit)


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "peak"),
    [
        (H200, "bfloat16", "ieee", 1070.5), (H200, "float8_e4m3fn", "ieee", 2141.1),
        (H200, "float32", "ieee", 66.9), (H200, "float32", "tf32", 535.3), (H200, "float64", "ieee", 66.9),
        (A100, "bfloat16", "ieee", 312), (A100, "float32", "ieee", 19.5), (MI300, "float32", "ieee", 163.4),
    ],
)  # fmt: skip
def test_peaks_are_the_makers(device, dtype, precision, peak):
    problem = MatmulProblem(1, 64, 64, 64, dtype, "float32", precision=precision)
    assert peak_tflops(problem, device) == pytest.approx(peak, rel=0.01)
    assert peak_tflops(problem, replace(device, arch=70, backend="cuda")) is None


@pytest.mark.parametrize(
    "target", ["nvidia-h200", "gfx942", *(pytest.param(name, marks=STACKS) for name in ("sm_80", "sm_100"))]
)
def test_compiled_for_absent_targets(target):
    found = tritile.explain(SQUARE, device=target_device(target))
    assert found.resources.registers > 16
    assert found.resources.shared > 1024
    assert target == "gfx942" or found.occupancy.warps <= found.occupancy.most_warps
    assert found.source in ("model", "table")
    tiles = [(one.config["BLOCK_M"], one.config["BLOCK_N"]) for one in (found, *found.alternatives)]
    assert len(set(tiles)) == 5


def test_alternatives_have_figures_of_their_own(square, uncompiled):
    for one in square.alternatives:
        own = tritile.explain(SQUARE, device=H200, config=one.config)
        names = ("tiled", "tiling", "parts_us", "bound", "predicted_us", "measured_us")
        assert [getattr(one, name) for name in names] == [getattr(own, name) for name in names]
        unit, longest = next(iter(one.parts_us.items()))  # which bounds, unless none explains the time
        assert one.bound == (unit if one.predicted_us < 1.5 * longest else explaining.LATENCY)
        assert str(one.config) in repr(square)


def test_measured_comes_first(square, uncompiled, monkeypatch):
    assert square.measured_us is None
    assert "not on this GPU: `tritile tune`" in repr(square)
    trials = [Trial(SQUARE, TILE, 7.5), Trial(SQUARE, SLOW, 9.0)]
    monkeypatch.setattr(explaining, "trials", lambda problem, device: trials)
    tuned = tritile.explain(SQUARE, device=H200, config=TILE)
    assert tuned.measured_us == 7.5
    assert "7.5 us, " in repr(tuned)
    assert {one.config: one.measured_us for one in tuned.alternatives}[SLOW] == 9.0
    measured = [one.measured_us is not None for one in tuned.alternatives]
    assert measured == sorted(measured, reverse=True)


def test_uncompilable_says_so(uncompiled):
    found = tritile.explain(SQUARE, device=H200, config=TILE)
    assert (found.resources, found.occupancy, found.failure) == (None, None, "it does not compile")
    assert "it does not compile" in repr(found)


def test_transposes_count_sectors():
    found = tritile.explain(PermuteProblem.transposed(1, 4096, 4096, 4), device=H200)
    elements = 4096**2
    assert found.untiled.total == elements * 4 + elements * 32
    assert found.unique.total == found.tiled.total == elements * 8
    assert found.intensity == 0
    assert found.roof_us == pytest.approx(elements * 8 / 4800e3)
    assert (found.tiling.filled, found.reuse) == (1.0, 4.5)


def test_bytes_of_thin_permutations():
    for width, size in ((3, 1), (8, 1), (2, 8)):  # as many elements share a sector as fit
        thin = PermuteProblem.transposed(1, width, 96_000, size)
        assert traffic.untiled(thin).written == pytest.approx(width * 96_000 * width * size, rel=0.01)
    wide = PermuteProblem.of((4096, 512), (1, 0), (512, 1), 4)
    assert traffic.unique(wide) == traffic.Traffic(4096 * 4, 4096 * 512 * 4)  # read once


def test_tiles_never_ask_more():
    """Check that elements with gaps between them share sectors in a tile too."""
    gaps = PermuteProblem.of((2048, 2048), (2048 * 16, 16), (2048, 1), 1)
    turned = PermuteProblem.of((2048, 2048), (16, 2048 * 16), (2048, 1), 1)
    for problem in (gaps, turned, PermuteProblem.transposed(3, 37, 391, 2)):
        for config in waves.ranked(problem, H200)[:200:40]:
            assert traffic.tiled(problem, config, H200).total < 1.35 * traffic.untiled(problem).total, config


@pytest.mark.parametrize(
    ("m", "n", "size"), [(129, 4096, 1), (100, 4096, 4), (4097, 4097, 2), (48, 50, 8), (7, 9, 1)]
)
def test_permutation_tiles_of_kernels(m, n, size):
    problem = PermuteProblem.transposed(2, m, n, size)
    for config in waves.ranked(problem, H200)[::97]:
        (step,) = work_of(call_for(problem), config, H200.processors, early=False).steps
        assert traffic.tiling(problem, config, H200).tiles == math.prod(step.grid), config


def test_no_part_exceeds_measured():
    """Compare device memory and arithmetic at their peaks with the shipped table."""
    checked = 0
    for entry in gpu_tables.shipped(H200)[0].entries:
        if isinstance(entry.problem, MatmulProblem) and entry.us:
            times = parts_us(entry.problem, entry.config, H200)
            for part in (explaining.TENSOR_CORES, explaining.FMA):
                assert times.get(part, 0) < entry.us, entry
            kept = H200.l2_bytes / entry.problem.bytes  # what the launch before left in L2 is not read
            assert times[explaining.MEMORY] * (1 - kept) < entry.us, entry
            checked += 1
    assert checked > 200


def test_tensors_explained_for_named_gpu():
    a, b = torch.empty(96, 64), torch.empty(64, 80)
    found = tritile.explain("matmul", a, b, device=H200)
    assert found.problem == tritile.plan(tritile.matmul, a, b, device=H200).problem
    assert tritile.explain(tritile.permute, a, (1, 0), device=H200).problem.op == "permute"
    if not torch.cuda.is_available():
        with pytest.raises(InvalidValueError, match="pass device="):
            tritile.explain("matmul", a, b)


def test_json_and_notebooks_hold_an_explanation(square):
    found = json.loads(json.dumps(square.to_dict()))
    assert Config.from_dict(found["config"]) == TILE
    assert found["untiled"]["read"] == square.untiled.read
    assert problem_from_dict(found["problem"]) == SQUARE
    assert Config.from_dict(found["alternatives"][0]["config"]) == square.alternatives[0].config
    assert "<td>bytes with these tiles</td>" in square._repr_html_()
    escaped = Plan(SQUARE, TILE, "model", H200, 1.0, "<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in escaped
    assert "&lt;script&gt;" in escaped


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "tile BLOCK_M=7",
            r"has BLOCK_M=7 together with tile \(did you mean 16\?\): expected one of 16, 32, 64",
        ),
        ("nonsense", "has family=nonsense: expected one of descriptor, tile, warpgroups"),
        ("WIDTH=3", "no config has WIDTH: expected one of BLOCK_K, .*families tile, descriptor, warpgroups"),
        (
            "tile SPLIT_K=2",
            "no config has SPLIT_K together with tile: expected one of BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M",
        ),
        ("BLOCK_M=64 BLOCK_M=32", "each name once"),
        ("BLOCK_M=512", r"BLOCK_M=512 \(did you mean 256\?\): expected"),
        ("BLOCK_M=13", r"BLOCK_M=13 \(did you mean 16\?\): expected"),
        ("BLOCK_M=6a", r"has BLOCK_M=6a: expected"),
        ("BLOCK_M=", "NAME=VALUE"),
    ],
)
def test_unknown_config_is_refused(text, fault):
    with pytest.raises(InvalidValueError, match=fault):
        config_like(text, SQUARE, H200)


def test_config_by_some_parameters():
    assert config_like("", SQUARE, H200) == waves.pick(SQUARE, H200)
    found = config_like("tile BLOCK_M=64, num_warps=8", SQUARE, H200)
    assert (found.family, found["BLOCK_M"], found.num_warps) == ("tile", 64, 8)
    for config in waves.ranked(SQUARE, H200)[:50:20]:
        assert config_like(str(config), SQUARE, H200) == config


def test_own_kernel_where_torch_runs(uncompiled):
    by_torch = MatmulProblem(1, 1000, 1000, 1000, "bfloat16", "bfloat16")
    with tritile.mode(backends="triton,aten"):
        assert tritile.plan(by_torch, device=H200).config.family == "aten"
        found = tritile.explain(by_torch, device=H200)
        assert found.config.family != "aten"
        assert found.call == tritile.plan(by_torch, device=H200)
        told = f"runs torch's kernel here: {found.call.us:.1f} us predicted; below is"
        assert f"{told} the fastest of tritile's\n" in repr(found)
        assert found.to_dict()["call"]["config"]["family"] == "aten"
        assert f"{told} the requested config\n" in repr(tritile.explain(by_torch, device=H200, config=TILE))
    with tritile.mode(backends="triton"):
        assert "torch" not in repr(tritile.explain(by_torch, device=H200))


def test_what_cannot_be_explained_is_refused():
    x, config = torch.empty(64, 64), Config.of(family="warpgroups", BLOCK_M=128, BLOCK_N=64, BLOCK_K=64)
    for what, words, fault in (
        ((tritile.transpose, x), {"out": x}, "in place"),
        ((tritile.transpose,), {"input": x, "out": x[:]}, "in place"),
        (("matmul", x, x), {"config": 7}, "config is 7"),
        ((SQUARE,), {"device": A100, "config": config}, "A100"),
    ):
        with pytest.raises(InvalidValueError, match=fault):
            tritile.explain(*what, **{"device": H200} | words)


def test_torch_only_is_refused():
    with tritile.mode(backends="triton,aten"), pytest.raises(UnsupportedError) as told:
        tritile.explain(MatmulProblem(1, 64, 64, 64, "float32", "float32", precision="torch"), device=H200)
    assert str(told.value).startswith("explain: only torch computes 64x64x64 NN float32 torch")


def test_a_plan_is_logged_once(uncompiled, caplog):
    tritile.forget()
    with caplog.at_level(logging.INFO, logger="tritile.plan"):
        found = tritile.explain(MatmulProblem(1, 777, 4099, 4096, "bfloat16", "bfloat16"), device=H200)
    assert found.call.config == found.config
    assert len(caplog.records) == 1


@pytest.mark.parametrize("target", ["h200", later("h100")])
def test_predicted_time_is_fastest(target):
    """The plan's time, and no other config is predicted to be faster."""
    gpu, seen = target_device(target), 0
    for case in unseen.draw("explained", 4, 2):
        with tritile.mode(backends="triton"):
            plan = tritile.plan(case.problem, device=gpu)
        if plan.source != "predicted" or plan.why.startswith("by the formula of"):
            continue
        seen += 1
        found = tritile.explain(case.problem, device=gpu)
        assert found.predicted_us == plan.us
        assert all(each.predicted_us >= plan.us for each in found.alternatives), case.problem.label
    assert seen >= 3


def test_other_gpu_times_do_not_count(uncompiled):
    problem = MatmulProblem(1, 1, 512, 2048, "bfloat16", "bfloat16", b_layout="column")
    there, here = (tritile.explain(problem, device=gpu) for gpu in ("h200", "h100"))
    assert (there.source, here.source, there.config) == ("table", "table", here.config)
    assert (there.measured_us is None, here.measured_us) == (False, None)
    assert (" us measured; " in there.summary, " us predicted; " in here.summary) == (True, True)
