"""Calibrating, with a clock that is a formula: candidates, what is timed at a size, and the portfolio."""

import functools
import itertools
import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.commands import run as run_command
from tests.configs import tma, warpgroups
from tritile.choose import gpu_tables, pick, table, waves
from tritile.cli import calibrating
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem, problem_from_dict
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.tune.calibrate import fit, run, sweep
from tritile.tune.calibrate.draw import drawn

H200, A100 = target_device("nvidia-h200"), target_device("sm_80")
NAME = "permute_2"  # a class of few legal configs
SPLIT_OFF, NOISE = 0.6, 0.01  # by which what programs share takes less than the model thinks


def clock(config, problem):
    us = waves.predict_us(config, problem, H200) * (SPLIT_OFF if sweep.kind_of(config)[1] else 1.0)
    return us * (1 + NOISE * random.Random(f"{config.key} {problem}").uniform(-1, 1))


@pytest.fixture
def timed(monkeypatch):
    """Replaces the GPU: every time that was asked for."""
    asked = []

    def time(problem, configs, device, flush, tell):
        asked.append((problem, list(configs)))
        return sweep.Row(problem, {config: clock(config, problem) for config in configs}, 7.0)

    monkeypatch.setattr(sweep, "compile_all", lambda wanted, device, tell: set(list(wanted)[:1]))
    monkeypatch.setattr(sweep, "timed", time)
    monkeypatch.setattr(sweep, "flusher", lambda device: None)
    return asked


@pytest.fixture
def hasty(monkeypatch):
    """Ends fits early, where a test asks what is made of them and not how well."""
    monkeypatch.setattr(fit, "_STEPS", 4)
    monkeypatch.setattr(fit, "_BATCHES", 10)


likely = functools.cache(run.likely)  # to rank a space takes long


@functools.cache
def few_candidates(count, name=NAME, device=H200):
    weights = {}
    for problem in drawn(name, 4, "candidates"):
        times = likely(problem, device)
        for config, us in times.items():
            weights[config] = weights.get(config, 0.0) + 1.2 - us / min(times.values())
    return sorted(weights, key=weights.get, reverse=True)[:count]


def test_likely_configs_near_best():
    problem = MatmulProblem(1, 50, 1408, 20736, "bfloat16", "bfloat16")
    found = likely(problem, H200)
    best = waves.pick(problem, H200)
    assert found[sweep.banded(best)] == min(found.values())
    assert max(found.values()) <= 1.2 * min(found.values())
    assert {config["GROUP_M"] for config in found} == {8}
    skinny_k = MatmulProblem(1, 4, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
    for problem in (skinny_k, PermuteProblem.of((2, 10913728, 5), (5, 10, 1), (54568640, 5, 1), 1)):
        outside = waves.outside_portfolios(problem, H200)
        assert outside
        assert not likely(problem, H200).keys() & set(outside)


def unsplit(config):
    return config.family == "descriptor" and config["SPLIT_K"] == 1


def test_hopper_candidates_warpgroups(monkeypatch, hasty):
    """In place of descriptor configs without split-K."""
    monkeypatch.setattr(run, "WorkerPool", ThreadPoolExecutor)
    problem, odd = (MatmulProblem(1, 4096, 4096, k, "bfloat16", "bfloat16") for k in (4096, 4097))
    plain = tma(128, 128, 64, 8, 4, persistent=True)
    known = table.Table({}, {}, (table.Entry(problem, plain, 1.0), table.Entry(odd, plain, 1.0)))
    for one, name, device, some in (
        (problem, "bf16_nn", H200, False),
        (problem, "bf16_nn", target_device("b200"), True),
        (replace(odd, a_align=2), "unaligned_16bit", H200, True),
    ):
        found = run.candidates(name, [one], device, [known], 200)
        assert any(map(unsplit, found)) == some
        assert (plain in found) == (name == "bf16_nn" and some)

    configs = [plain, *(warpgroups(128, n, 64, 2, 4) for n in (16, 32, 48, 64, 80))]
    sizes = drawn("bf16_nn", 8, "")
    rows = [sweep.Row(size, dict(zip(configs, range(1, 7), strict=True)), 1.0) for size in sizes]
    measured = run.Measured("bf16_nn", rows, H200)
    assert plain not in measured.portfolio(measured.left_out()).configs
    assert measured.fastest.tolist() == 8 * [1.0]  # what it was timed at counts
    with pytest.raises(TuningError, match="too few"):
        run.Measured("bf16_nn", [row._replace(times=dict.fromkeys(configs[:5], 1.0)) for row in rows], H200)


def test_candidates_known_and_per_size(monkeypatch):
    monkeypatch.setattr(run, "WorkerPool", ThreadPoolExecutor)
    monkeypatch.setattr(run, "likely", likely)
    shipped, *_ = gpu_tables.shipped(H200)
    deep = MatmulProblem(1, 48, 64, 25600, "bfloat16", "bfloat16", b_layout="column")
    problems = [*drawn("bf16_nt", 2, "candidates"), deep]
    found = run.candidates("bf16_nt", problems, H200, [shipped], 150)
    own = {sweep.banded(config) for config in shipped.portfolios["bf16_nt"].configs}
    assert own <= set(found)
    assert len(set(found)) == len(found) == 150
    few = run.candidates("bf16_nt", problems, H200, [], 20)
    assert len(few) == 20
    for problem in problems:
        times = likely(problem, H200)
        assert min(times[config] for config in few if config in times) == min(times.values())
    assert any(dict(config.kwargs).get("SPLIT_K", 1) > 1 for config in few)


def test_kind_errors_are_learnt():
    shipped, *_ = gpu_tables.shipped(H200)
    chooser = sweep.Chooser(shipped.portfolios["bf16_nt"].configs, H200)

    def splits(problem):
        return [sweep.kind_of(config)[1] for config in chooser.choose(problem)]

    problem, other = itertools.islice((p for p in drawn("bf16_nt", 99, "") if len({*splits(p)}) == 2), 2)
    split = [config for config in chooser.choose(other) if sweep.kind_of(config)[1]]
    chooser.learn(other, {config: 9.0 * waves.predict_us(config, other, H200) for config in split})
    assert not any(splits(problem))


def test_sweep_times_near_configs(timed):
    refused, *configs = few_candidates(40)
    problems = drawn(NAME, 10, "sizes")
    rows = list(sweep.sweep(problems, sweep.ready(problems, [refused, *configs], H200, print), H200, print))
    assert [problem for problem, _ in timed] == problems
    assert [row.problem for row in rows] == [problem for problem, chosen in timed if chosen]
    for problem, chosen in timed:
        assert refused not in chosen
        least = min((waves.predict_us(config, problem, H200) for config in chosen), default=0.0)
        assert all(waves.predict_us(config, problem, H200) <= 2.2 * least for config in chosen)


def test_portfolio_loses_little(timed, hasty):
    problems = drawn(NAME, 60, "sizes")
    chooser = sweep.ready(problems, few_candidates(20), H200, print)
    rows = list(sweep.sweep(problems, chooser, H200, print))
    measured = run.Measured(NAME, rows, H200)
    left_out = measured.left_out(8)
    portfolio = measured.portfolio(left_out, 8)
    assert len(portfolio.configs) == 8
    assert measured.portfolio(left_out, 8) == portfolio  # the same times give the same
    lost, least = measured.lost(left_out.picks), measured.lost(left_out.fastest)
    assert portfolio.loss.sizes == len(lost) > 20
    assert portfolio.loss.median < 0.02
    assert (least >= 0).all()
    assert (lost >= least).all()
    with pytest.raises(TuningError, match="too few"):
        run.Measured(NAME, rows[:2], H200)


@pytest.fixture
def few(timed, hasty, monkeypatch):
    """Calibrates with twelve configs; every time that was asked for."""
    monkeypatch.setattr(
        run, "candidates", lambda name, problems, device, *rest: few_candidates(12, name, device)
    )
    return timed


def test_command_writes_what_plans_take(few, tmp_path, monkeypatch):
    gpu = replace(H200, name="NVIDIA X1", processors=100, memory_gbps=2000)  # unlike any that was measured
    monkeypatch.setattr("tritile.core.device.current_gpu", lambda: gpu)
    problem = PermuteProblem.transposed(1, 4096, 8192, 2)
    pick.forget()
    assert pick.plan_for(problem, gpu, "cached").source == "model"
    asked = ["tune", "--calibrate", NAME, "--sizes", "12", "--sweeps", str(tmp_path / "sweeps")]
    done = run_command(*asked)
    assert done.exit_code == 0, done.output
    assert NAME in done.output
    plan = pick.plan_for(problem, gpu, "cached")
    assert plan.source == "predicted"
    assert "measured here" in plan.why
    head, *lines = map(json.loads, (tmp_path / "sweeps" / f"{NAME}.jsonl").read_text().splitlines())
    assert head["device"]["name"] == gpu.name
    configs = [Config.from_dict(each) for each in head["configs"]]
    for line in lines:
        of = problem_from_dict(line["problem"])
        assert line["torch_us"] == 7.0
        for place, us in line["us"].items():
            assert math.isclose(us, clock(configs[int(place)], of), rel_tol=1e-4)
    pick.forget()


def test_next_class_compiles_meanwhile(few, tmp_path, monkeypatch):
    compiled, second, time = [], threading.Event(), sweep.timed

    def compile_all(wanted, device, tell):
        compiled.append(wanted)
        if len(compiled) == 2:
            second.set()
        return set()

    monkeypatch.setattr(sweep, "compile_all", compile_all)
    monkeypatch.setattr(sweep, "timed", lambda *given: second.wait() and time(*given))
    calibrating.calibrate([NAME, "permute_4"], H200, 12, 6, math.inf, tmp_path / "t.json", None)
    assert set(table.read(tmp_path / "t.json").portfolios) == {NAME, "permute_4"}


def test_classes_for_this_gpu(few, tmp_path, capsys):
    assert calibrating.classes_of(["all"]) == list(calibrating.MEASURED)
    assert calibrating.classes_of(["fp8", "fp8"]) == ["fp8"]
    for names in (["halves"], ["bf16_nn", "none"]):
        with pytest.raises(InvalidValueError, match="bf16_nn"):
            calibrating.classes_of(names)
    path = tmp_path / "a100.json"
    calibrating.calibrate([NAME, "fp8"], A100, 12, 6, math.inf, path, None)
    assert "fp8 is left out: no config" in capsys.readouterr().err
    assert table.read(path).portfolios.keys() == {NAME}
    with pytest.raises(UnsupportedError, match="runs none of fp8"):
        calibrating.calibrate(["fp8"], A100, 24, 6, math.inf, path, None)


def test_good_portfolio_is_kept(few, tmp_path, monkeypatch):
    """A few new sizes, or another file, do not replace it."""
    path = tmp_path / "own.json"

    def calibrate(sizes, seconds=math.inf, device=H200):
        calibrating.calibrate([NAME], device, sizes, 6, seconds, path, None)
        return table.read(path).portfolios[NAME]

    monkeypatch.setattr(calibrating, "time", SimpleNamespace(monotonic=lambda: len(few)))  # a second a size
    whole = calibrate(12)
    assert calibrate(12, seconds=6) == whole
    assert calibrate(24) != whole
    with pytest.raises(InvalidValueError, match="NVIDIA H200"):
        calibrate(12, device=replace(H200, name="NVIDIA X1"))
    old = table.read(path)
    stale = dict.fromkeys(old.kernels, "0" * 16)
    table.write(replace(old, kernels=stale, portfolios={"permute_4": replace(whole, name="permute_4")}), path)
    calibrate(12)
    assert set(table.read(path).portfolios) == {NAME}
