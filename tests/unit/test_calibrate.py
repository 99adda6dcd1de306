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
import typer.testing

from tests.configs import tma, warpgroups
from tritile.cli import calibrating
from tritile.cli import tune as command
from tritile.cli.shared import app
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem, problem_from_dict
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.planning import gpu_tables, model, plans, table
from tritile.tune.calibrate import fit, run, sweep
from tritile.tune.calibrate.draw import drawn

H200, A100 = target_device("nvidia-h200"), target_device("sm_80")
SPLIT_OFF, NOISE = 0.6, 0.01  # by which what programs share takes less than the model thinks


def clock(config, problem):
    us = model.predict_us(config, problem, H200) * (SPLIT_OFF if sweep.kind_of(config)[1] else 1.0)
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


def swept(problems, configs):
    return sweep.sweep(problems, sweep.ready(problems, configs, H200, print), H200, print)


@functools.cache
def few_candidates(count=100, name="halves-nt", device=H200):
    weights = {}
    for problem in drawn(name, 8, "candidates"):
        times = run.likely(problem, device)
        for config, us in times.items():
            weights[config] = weights.get(config, 0.0) + 1.2 - us / min(times.values())
    return sorted(weights, key=weights.get, reverse=True)[:count]


def test_likely_configs_are_near_the_best_and_such_as_portfolios_hold():
    problem = drawn("halves-nn", 1, "one")[0]
    found = run.likely(problem, H200)
    best = model.pick(problem, H200)
    assert found[sweep.banded(best)] == min(found.values())
    assert max(found.values()) <= 1.2 * min(found.values())
    assert {config["GROUP_M"] for config in found} == {8}
    skinny_k = MatmulProblem(1, 4, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
    for problem in (skinny_k, PermuteProblem.of((2, 10913728, 5), (5, 10, 1), (54568640, 5, 1), 1)):
        assert {config.family for config in model.outside_portfolios(problem, H200)}
        assert not run.likely(problem, H200).keys() & set(model.outside_portfolios(problem, H200))


def unsplit(config):
    return config.family == "descriptor" and config["SPLIT_K"] == 1


def test_aligned_products_on_hopper_have_warpgroups_in_the_place_of_unsplit_descriptors(monkeypatch, hasty):
    monkeypatch.setattr(run, "Workers", ThreadPoolExecutor)
    problem, odd = (MatmulProblem(1, 4096, 4096, k, "bfloat16", "bfloat16") for k in (4096, 4097))
    plain = tma(128, 128, 64, 8, 4, persistent=True)
    known = table.Table({}, {}, (table.Entry(problem, plain, 1.0), table.Entry(odd, plain, 1.0)))
    for one, name, device, some in (
        (problem, "halves-nn", H200, False),
        (problem, "halves-nn", target_device("b200"), True),
        (replace(odd, a_align=2), "halves-odd", H200, True),
    ):
        assert any(map(unsplit, run.likely(one, device))) == some
        found = run.candidates(name, [one], device, [known], 200)
        assert any(map(unsplit, found)) == some
        assert (plain in found) == (name == "halves-nn" and some)

    configs = [plain, *(warpgroups(128, n, 64, 2, 4) for n in (16, 32, 48, 64, 80))]
    rows = [
        sweep.Row(p, dict(zip(configs, range(1, 7), strict=True)), 1.0) for p in drawn("halves-nn", 8, "")
    ]
    measured = run.Measured("halves-nn", rows, H200)
    assert plain not in measured.portfolio(measured.left_out()).configs
    assert measured.fastest.tolist() == 8 * [1.0]  # what it was timed at counts
    with pytest.raises(TuningError, match="too few"):
        run.Measured(
            "halves-nn",
            [sweep.Row(p, dict.fromkeys(configs[:5], 1.0), 1.0) for p in drawn("halves-nn", 8, "")],
            H200,
        )


def test_candidates_hold_what_is_known_and_one_for_every_size(monkeypatch):
    monkeypatch.setattr(run, "Workers", ThreadPoolExecutor)
    shipped, *_ = gpu_tables.shipped(H200)
    problems = drawn("halves-nt", 2, "candidates")
    deep = MatmulProblem(1, 48, 64, 25600, "bfloat16", "bfloat16", b_layout="column")
    found = run.candidates("halves-nt", [*problems, deep], H200, [shipped], 150)
    own = {sweep.banded(config) for config in shipped.portfolios["halves-nt"].configs}
    assert own <= set(found)
    assert len(set(found)) == len(found) == 150
    few = run.candidates("halves-nt", [*problems, deep], H200, [], 20)
    assert len(few) == 20
    for problem in (*problems, deep):
        times = run.likely(problem, H200)
        assert min(times[config] for config in few if config in times) == min(times.values())
    assert any(dict(config.kwargs).get("SPLIT_K", 1) > 1 for config in few)


def test_how_far_a_kind_is_off_is_learnt():
    configs = few_candidates()
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}
    split = Config.of(4, 6, "descriptor", **blocks, PERSISTENT=False, SPLIT_K=2, SUBTILES=1)

    def behind(problem):
        """How far the split config is predicted behind the best; None if that is split, or it is illegal."""
        own = {c: model.predict_us(c, problem, H200) for c in sweep.useful([*configs, split], problem, H200)}
        alike = sweep.kind_of(min(own, key=own.__getitem__)) == sweep.kind_of(split)
        return own[split] / min(own.values()) if split in own and not alike else None

    chooser = sweep.Chooser([*configs, split], H200)
    tried = ((problem, behind(problem)) for problem in drawn("halves-nt", 300, "split"))
    found = (problem for problem, times in tried if times is not None and 1.3 < times < 1.9)
    far = list(itertools.islice(found, 2))
    assert len(far) == 2
    assert split in chooser.choose(far[0])
    chooser.learn(far[1], {split: 2.0 * model.predict_us(split, far[1], H200)})
    assert split not in chooser.choose(far[0])


def test_a_sweep_times_what_may_be_near_and_not_what_was_refused(timed):
    configs = few_candidates()
    problems = drawn("halves-nt", 10, "sizes")
    rows = list(swept(problems, configs))
    assert [row.problem for row in rows] == [problem for problem, _ in timed]
    refused = configs[0]
    for problem, chosen in timed:
        assert refused not in chosen
        least = min(model.predict_us(config, problem, H200) for config in chosen)
        plain = [c for c in chosen if not sweep.kind_of(c)[1]]
        assert all(model.predict_us(c, problem, H200) <= 2.2 * least for c in plain)


def test_a_portfolio_is_measured_and_loses_little(timed, hasty):
    name = "permute-2"
    rows = list(swept(drawn(name, 60, "sizes"), few_candidates(20, name)))
    measured = run.Measured(name, rows, H200)
    left_out = measured.left_out(8)
    portfolio = measured.portfolio(left_out, 8)
    assert len(portfolio.configs) == 8
    lost, least = measured.lost(left_out.picks), measured.lost(left_out.fastest)
    assert portfolio.loss.sizes == len(lost) > 20
    assert portfolio.loss.median < 0.02
    assert (least >= 0).all()
    assert (lost >= least).all()
    with pytest.raises(TuningError, match="too few"):
        run.Measured(name, rows[:2], H200)


def test_the_command_writes_what_plans_then_take(timed, hasty, tmp_path, monkeypatch):
    gpu = replace(H200, name="NVIDIA X1", arch=90, processors=100)
    monkeypatch.setattr(run, "candidates", lambda *asked: few_candidates(6))
    monkeypatch.setattr(command.devices, "current_gpu", lambda: gpu)
    problem = drawn("halves-nt", 1, "mine")[0]
    plans.forget()
    assert plans.plan_for(problem, gpu, "cached").source == "model"
    asked = ["tune", "--calibrate", "halves-nt", "--sizes", "12", "--sweeps", str(tmp_path / "sweeps")]
    done = typer.testing.CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "halves-nt" in done.output
    plan = plans.plan_for(problem, gpu, "cached")
    assert plan.source == "predicted"
    assert "measured here" in plan.why
    head, *lines = map(json.loads, (tmp_path / "sweeps" / "halves-nt.jsonl").read_text().splitlines())
    assert head["device"]["name"] == gpu.name
    configs = [Config.from_dict(each) for each in head["configs"]]
    for line in lines:
        of = problem_from_dict(line["problem"])
        assert line["torch_us"] == 7.0
        for place, us in line["us"].items():
            assert math.isclose(us, clock(configs[int(place)], of), rel_tol=1e-4)
    plans.forget()


def test_the_next_class_is_compiled_while_one_is_timed_and_others_are_refused(
    timed, hasty, tmp_path, monkeypatch
):
    compiled, second, time = [], threading.Event(), sweep.timed

    def compile_all(wanted, device, tell):
        compiled.append(wanted)
        if len(compiled) == 2:
            second.set()
        return set()

    monkeypatch.setattr(sweep, "compile_all", compile_all)
    monkeypatch.setattr(sweep, "timed", lambda *given: second.wait() and time(*given))
    monkeypatch.setattr(run, "candidates", lambda *asked: few_candidates(6))
    calibrating.calibrate(["halves-nt", "halves-nn"], H200, 20, 6, math.inf, tmp_path / "t.json", None)
    assert set(table.read(tmp_path / "t.json").portfolios) == {"halves-nt", "halves-nn"}
    assert calibrating.classes_of(["all"]) == list(calibrating.MEASURED)
    assert calibrating.classes_of(["fp8", "fp8"]) == ["fp8"]
    for names in (["halves"], ["halves-nn", "none"]):
        with pytest.raises(InvalidValueError, match="halves-nn"):
            calibrating.classes_of(names)


def test_classes_that_a_gpu_cannot_run_are_left_out(timed, hasty, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "candidates", lambda *asked: few_candidates(6, device=A100))
    path = tmp_path / "a100.json"
    calibrating.calibrate(["halves-nt", "fp8"], A100, 20, 6, math.inf, path, None)
    assert "fp8 is left out: no config" in capsys.readouterr().err
    assert table.read(path).portfolios.keys() == {"halves-nt"}
    with pytest.raises(UnsupportedError, match="runs none of fp8"):
        calibrating.calibrate(["fp8"], A100, 24, 6, math.inf, path, None)


def test_a_good_portfolio_is_not_given_up_for_a_few_sizes_nor_anothers_file(
    timed, hasty, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "candidates", lambda *asked: few_candidates(6))
    path = tmp_path / "own.json"

    def calibrate(sizes, seconds=math.inf, device=H200):
        calibrating.calibrate(["halves-nt"], device, sizes, 6, seconds, path, None)
        return table.read(path).portfolios["halves-nt"]

    monkeypatch.setattr(calibrating, "time", SimpleNamespace(monotonic=lambda: len(timed)))  # a second a size
    whole = calibrate(12)
    assert calibrate(12, seconds=6) == whole
    assert calibrate(16) != whole
    other = replace(H200, name="NVIDIA X1")
    with pytest.raises(InvalidValueError, match="NVIDIA H200"):
        calibrate(12, device=other)
    old = table.read(path)
    stale = replace(
        old, kernels=dict.fromkeys(old.kernels, "0" * 16), portfolios={"fp8": replace(whole, name="fp8")}
    )
    table.write(stale, path)
    calibrate(12)
    assert set(table.read(path).portfolios) == {"halves-nt"}
