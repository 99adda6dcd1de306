"""Explanations: figures worked out by hand, what compiled kernels take, words, and bad input."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tritile
from tritile import cli, model, plans, traffic
from tritile.config import Config
from tritile.device import target_device
from tritile.errors import InvalidValueError, TuningError
from tritile.explain import bounds, config_like, explanation
from tritile.explain.hardware import Waves, occupancy
from tritile.explain.telling import bytes_text
from tritile.model.matmul import peak_tflops
from tritile.offline import Resources
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.report import recorded

H200, A100, MI300 = map(target_device, ("nvidia-h200", "sm_80", "gfx942"))
SQUARE = MatmulProblem(1, 1024, 1024, 1024, "bfloat16", "bfloat16")
TILE = Config.of(family="tile", BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)
TRIALS = Path(__file__).parents[2] / "tuning" / "trials"


@pytest.fixture(scope="module")
def square():
    return tritile.explain(SQUARE, device=H200, config=TILE)


def test_bytes_of_a_product_by_hand(square):
    assert square.untiled.total == 1024**3 * 2 * 2 + 1024**2 * 2
    assert square.tiled.total == 2 * (8 * 1024**2 * 2) + 1024**2 * 2
    assert square.least.total == 3 * 1024**2 * 2
    assert square.reuse == pytest.approx(square.untiled.total / square.tiled.total)


def test_roofline_by_hand(square):
    peak = 4096 * 132 * 1.98e9  # operations a clock of a multiprocessor, by their number and clock
    assert square.peak_tflops == pytest.approx(peak / 1e12)
    assert square.intensity == 2 * 1024**3 / (3 * 1024**2 * 2)
    assert square.ridge == pytest.approx(peak / 4800e9)
    assert square.roof_us == pytest.approx(2 * 1024**3 / peak * 1e6)
    thin = tritile.explain(MatmulProblem(1, 1, 8192, 8192, "bfloat16", "bfloat16"), device=H200)
    assert thin.roof_us == pytest.approx(thin.least.total / 4800e3)
    assert thin.bound == bounds.MEMORY


def test_a_gpu_whose_peak_is_not_known_has_the_roof_of_memory():
    unknown = replace(A100, name="Orin", arch=87)
    found = tritile.explain(SQUARE, device=unknown)
    assert (found.peak_tflops, found.ridge) == (None, None)
    assert found.roof_us == pytest.approx(found.least.total / (unknown.memory_gbps * 1e3))
    assert "not known" in repr(found)


def test_tiles_and_waves(square):
    assert (square.work.tiles, square.work.units, square.work.filled) == (64, 64, 1.0)
    assert square.waves.count == 1
    assert square.waves.idle == pytest.approx(1 - 64 / square.waves.at_once)
    assert Waves(265, 132).count == 3
    assert Waves(265, 132).idle == pytest.approx(131 / 132)
    ragged = bounds.work_of(MatmulProblem(2, 129, 100, 65, "bfloat16", "bfloat16"), TILE)
    assert ragged.tiles == 4
    assert ragged.filled == pytest.approx(129 / 256 * 100 / 128 * 65 / 128)


def test_a_persistent_kernel_has_one_program_a_multiprocessor():
    config = config_like("warpgroups PERSISTENT=True", SQUARE, H200)
    found = tritile.explain(SQUARE, device=H200, config=config)
    assert found.waves.at_once == 132


@pytest.mark.parametrize(
    ("taken", "warps", "device", "programs", "limit"),
    [  # as NVIDIA's occupancy calculator has them
        (Resources(128, 0, 0), 4, H200, 4, "registers"),
        (Resources(32, 0, 0), 8, H200, 8, "registers"),
        (Resources(16, 0, 0), 8, H200, 8, "warps"),
        (Resources(16, 0, 0), 1, H200, 32, "programs"),
        (Resources(32, 0, 100_000), 4, H200, 2, "shared memory"),
        (Resources(33, 0, 0), 4, A100, 12, "registers"),
        (Resources(32, 0, 232448), 4, H200, 1, "shared memory"),
        (Resources(128, 0, 0), 4, MI300, 4, "registers"),
        (Resources(32, 0, 40_000), 4, MI300, 1, "shared memory"),
    ],
)
def test_occupancy(taken, warps, device, programs, limit):
    found = occupancy(taken, warps, device)
    assert (found.programs, found.warps, found.limit) == (programs, programs * warps, limit)


def test_peaks_are_the_makers():
    def tflops(dtype, device):
        return peak_tflops(MatmulProblem(1, 64, 64, 64, dtype, dtype), device)

    assert tflops("float32", H200) == pytest.approx(67, rel=0.01)
    assert tflops("float64", H200) == pytest.approx(67, rel=0.01)
    assert tflops("bfloat16", A100) == pytest.approx(312, rel=0.01)
    assert tflops("float32", A100) == pytest.approx(19.5, rel=0.01)
    assert tflops("float32", MI300) == pytest.approx(163.4, rel=0.01)


@pytest.mark.parametrize("target", ["nvidia-h200", "sm_80", "sm_100", "gfx942"])
def test_kernels_are_really_compiled_for_targets_that_are_not_here(target):
    found = tritile.explain(SQUARE, device=target_device(target))
    assert found.taken.registers > 16
    assert found.taken.shared > 1024
    assert found.occupancy.warps <= found.occupancy.most
    assert found.source in ("model", "table")
    assert len(found.others) == 4
    tiles = [(one.config.family, one.config["BLOCK_M"], one.config["BLOCK_N"]) for one in found.others]
    assert len(set(tiles)) == 4
    assert all(other.why for other in found.others)


def test_the_longest_part_bounds_unless_none_explains_the_time():
    assert bounds.bound({"a": 2.0, "b": 1.0}, 2.9) == "a"
    assert bounds.bound({"a": 2.0, "b": 1.0}, 3.1) == bounds.START


def test_why_a_config_loses_names_what_is_worse():
    large = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16")
    best = model.pick(large, H200)
    small = config_like("descriptor BLOCK_M=64 BLOCK_N=64", large, H200)
    assert bounds.why_slower(large, small, best, H200).startswith(("L2 cache: ", "shared memory: "))
    ragged = MatmulProblem(1, 65536, 136, 8192, "bfloat16", "bfloat16")
    best = model.pick(ragged, H200)
    wide = config_like("descriptor BLOCK_N=256", ragged, H200)
    assert "beyond the edge" in bounds.why_slower(ragged, wide, best, H200)
    assert "measuring tells" in bounds.why_slower(large, model.pick(large, H200), small, H200)


def test_what_was_measured_is_told_and_is_not_taken_for_now(square):
    assert square.measured_us is None
    assert "not measured here" in repr(square)
    plan = plans.Plan(SQUARE, TILE, "exact", H200, 7.5, "")
    tuned = explanation.explained(plan)
    assert tuned.measured_us == 7.5
    assert "when it was tuned" in repr(tuned)
    timed = explanation.explained(plan, measure=lambda config: 5.0 if config == TILE else 6.0)
    assert (timed.measured_us, timed.live) == (5.0, True)
    assert {other.measured_us for other in timed.others} == {6.0}
    assert "now: " in repr(timed)


def test_another_config_that_does_not_run_is_told_without_a_time():
    def measure(config):
        if config != TILE:
            raise TuningError("no")
        return 5.0

    found = explanation.explained(plans.Plan(SQUARE, TILE, "exact", H200), measure=measure)
    assert {other.measured_us for other in found.others} == {None}


def test_a_kernel_that_does_not_compile_is_said_to(monkeypatch):
    def refuse(*_):
        raise TuningError("it does not compile")

    monkeypatch.setattr(explanation, "_compiled", refuse)
    found = tritile.explain(SQUARE, device=H200, config=TILE)
    assert found.taken is None
    assert "it does not compile" in repr(found)


def test_transposes_count_sectors():
    problem = PermuteProblem.turned(1, 4096, 4096, 4)
    found = tritile.explain(problem, device=H200)
    elements = 4096**2
    assert found.untiled.total == elements * 4 + elements * 32
    assert found.least.total == found.tiled.total == elements * 8
    assert found.intensity == 0
    assert found.roof_us == pytest.approx(elements * 8 / 4800e3)
    stays = PermuteProblem.of((64, 32, 48), (48, 64 * 48, 1), (32 * 48, 48, 1), 4)
    assert traffic.untiled(stays).written == 64 * 32 * 48 * stays.itemsize // (stays.itemsize // 4)


def test_tensors_are_explained_for_the_gpu_that_is_named():
    a, b = torch.empty(96, 64), torch.empty(64, 80)
    found = tritile.explain(a, b, device=H200)
    assert found.problem == tritile.plan(tritile.matmul, a, b, device=H200).problem
    assert tritile.explain(a, device=H200).problem.op == "permute"
    assert tritile.explain(tritile.permute, a, (1, 0), device=H200).problem.op == "permute"
    if not torch.cuda.is_available():
        with pytest.raises(InvalidValueError, match="target_device"):
            tritile.explain(a, b)


def test_notebooks_get_tables_that_are_escaped(square):
    text = square._repr_html_()
    assert text.count("<table>") == 2
    assert "tiling cut them" in text
    plan = plans.Plan(SQUARE, TILE, "model", H200, 1.0, "<script>alert(1)</script>")
    assert "<script>" not in plan._repr_html_()
    assert "&lt;script&gt;" in plan._repr_html_()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tile BLOCK_M=7", r"BLOCK_M = 7 is of no config .* there are 16, 32, 64"),
        ("nonsense", "there are descriptor, tile, warpgroups"),
        ("WIDTH=3", "no WIDTH among .*families are tile, descriptor, warpgroups"),
        ("BLOCK_M=64 BLOCK_M=32", "each name once"),
        ("BLOCK_M=", "NAME=VALUE"),
    ],
)
def test_an_unknown_config_is_refused_with_what_there_is(text, fault):
    with pytest.raises(InvalidValueError, match=fault):
        config_like(text, SQUARE, H200)


def test_a_config_is_found_by_some_of_its_parameters():
    assert config_like("", SQUARE, H200) == model.pick(SQUARE, H200)
    found = config_like("tile BLOCK_M=64, num_warps=8", SQUARE, H200)
    assert (found.family, found["BLOCK_M"], found.num_warps) == ("tile", 64, 8)
    for config in model.ranked(SQUARE, H200)[:50:7]:
        assert config_like(str(config), SQUARE, H200) == config


def test_what_cannot_be_explained_is_refused():
    x = torch.empty(64, 64)
    with pytest.raises(InvalidValueError, match="in place"):
        tritile.explain(tritile.transpose, x, out=x, device=H200)
    with pytest.raises(InvalidValueError, match="config=7"):
        tritile.explain(x, x, config=7, device=H200)


def test_a_config_that_is_not_legal_is_refused():
    config = Config.of(family="warpgroups", BLOCK_M=128, BLOCK_N=64, BLOCK_K=64)
    with pytest.raises(InvalidValueError, match="A100"):
        tritile.explain(SQUARE, device=A100, config=config)


def test_bytes_are_written_as_people_do():
    given = {0: "0 B", 999: "999 B", 1000: "1 KB", 134_217_728: "134 MB", 2.2e12: "2.2 TB", 5e17: "500 PB"}
    assert {count: bytes_text(count) for count in given} == given


def test_the_command_takes_sizes_apart_or_joined():
    told = [
        CliRunner().invoke(cli.app, ["explain", *sizes, "--layout", "NT", "--target", "nvidia-h200"])
        for sizes in (["1001", "1003", "1007"], ["1001x1003x1007"])
    ]
    assert told[0].exit_code == 0, told[0].output
    assert told[0].output == told[1].output
    for words in ("1001x1003x1007 NT bfloat16", "untiled", "ridge", "waves", "registers", "bound by"):
        assert words in told[0].output
    turned = CliRunner().invoke(cli.app, ["explain", "511", "513", "--op", "transpose", "--target", "sm_80"])
    assert "sectors" in turned.output


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["64", "64"], "MxNxK"),
        (["64", "64", "0", "--target", "sm_90"], "0"),
        (["64x64x64", "--target", "sm_1"], "sm_1"),
        (["64x64x64", "--op", "conv", "--target", "sm_90"], "conv"),
        (["64x64x64", "--config", "tile BLOCK_M=5", "--target", "sm_90"], "BLOCK_M = 5"),
    ],
)
def test_the_command_refuses_what_is_none(arguments, fault):
    done = CliRunner().invoke(cli.app, ["explain", *arguments])
    assert done.exit_code != 0
    assert isinstance(done.exception, InvalidValueError)
    assert fault in str(done.exception)


@pytest.mark.parametrize(
    ("store", "every", "fastest"),
    [  # medians as measured, rounded up
        ("nvidia-h200-1", 0.08, 0.06),
        ("nvidia-h200-2", 0.06, 0.05),
        ("nvidia-h200-3", 0.10, 0.11),
        ("nvidia-h200-whole", 0.18, 0.04),
    ],
)
def test_predicted_times_against_what_was_measured(store, every, fastest):
    """Medians of how far predictions are from committed trials, of every config and of the fastest ones."""
    errors, best = [], []
    for (problem, _), own in recorded.times([TRIALS / f"{store}.sqlite3.gz"], H200).items():
        off = {config: abs(model.predict_us(config, problem, H200) / us - 1) for config, us in own.items()}
        errors += off.values()
        best.append(off[min(own, key=own.get)])
    assert statistics.median(errors) < every
    assert statistics.median(best) < fastest
