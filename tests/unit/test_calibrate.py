"""Calibrating, with a clock that is a formula: candidates, what is timed at a size, sweeps, and training."""

import functools
import gzip
import itertools
import json
import math
import random
import statistics
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

import tritile.tune.calibrate.candidates as choosing
from tests.commands import run as run_command
from tests.configs import tma, warpgroups
from tests.predictors import some_configs
from tritile.choose import gpu_tables, inputs, pick, predictor, table, waves
from tritile.choose.predictor import Network
from tritile.cli import calibrating
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem, problem_from_dict
from tritile.errors import FileError, InvalidValueError, TuningError, UnsupportedError
from tritile.families.space import illegal
from tritile.tune.calibrate import sweep, train
from tritile.tune.calibrate.draw import drawn
from tritile.tune.calibrate.files import Sweep, joined, read_sweep, write_sweep
from tritile.tune.calibrate.sweep import Row

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
        return Row(problem, {config: clock(config, problem) for config in configs}, 7.0)

    monkeypatch.setattr(sweep, "compile_all", lambda wanted, device, tell: set(list(wanted)[:1]))
    monkeypatch.setattr(sweep, "timed", time)
    monkeypatch.setattr(sweep, "flusher", lambda device: None)
    return asked


@pytest.fixture
def hasty(monkeypatch):
    """Ends training early, where a test asks what is made of it and not how well."""
    monkeypatch.setattr(train, "STEPS", 8)


likely = functools.cache(choosing.likely)  # to rank a space takes long


@functools.cache
def few_candidates(count, name=NAME, device=H200):
    weights = {}
    for problem in drawn(name, 4, "candidates"):
        times = likely(problem, device)
        for config, us in times.items():
            weights[config] = weights.get(config, 0.0) + 1.2 - us / min(times.values())
    return sorted(weights, key=weights.get, reverse=True)[:count]


# --- Candidates ---


def test_likely_configs_near_best():
    problem = MatmulProblem(1, 50, 1408, 20736, "bfloat16", "bfloat16")
    found = likely(problem, H200)
    best = waves.pick(problem, H200)
    assert found[sweep.banded(best)] == min(found.values())
    assert max(found.values()) <= 1.2 * min(found.values())
    assert {config["GROUP_M"] for config in found} == {8}
    skinny_k = MatmulProblem(1, 4, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
    for problem in (skinny_k, PermuteProblem.of((2, 10913728, 5), (5, 10, 1), (54568640, 5, 1), 1)):
        outside = waves.with_margins(problem, H200)
        assert outside
        assert not likely(problem, H200).keys() & set(outside)


def unsplit(config):
    return config.family == "descriptor" and config["SPLIT_K"] == 1


def test_hopper_candidates_warpgroups(monkeypatch):
    """In place of descriptor configs without split-K."""
    monkeypatch.setattr(choosing, "WorkerPool", ThreadPoolExecutor)
    problem, odd = (MatmulProblem(1, 4096, 4096, k, "bfloat16", "bfloat16") for k in (4096, 4097))
    plain = tma(128, 128, 64, 8, 4, persistent=True)
    known = table.Table({}, {}, (table.Entry(problem, plain, 1.0), table.Entry(odd, plain, 1.0)))
    for one, name, device, some in (
        (problem, "bf16_nn", H200, False),
        (problem, "bf16_nn", target_device("b200"), True),
        (replace(odd, a_align=2), "unaligned_16bit", H200, True),
    ):
        found = choosing.candidates(name, [one], device, [], [known], 200)
        assert any(map(unsplit, found)) == some
        assert (plain in found) == (name == "bf16_nn" and some)

    configs = [plain, *(warpgroups(128, n, 64, 2, 4) for n in (16, 32, 48, 64, 80))]
    sizes = drawn("bf16_nn", 8, "")
    rows = [Row(size, dict.fromkeys(configs, 9.0), 1.0) for size in sizes]
    assert plain not in train.Samples([Sweep("bf16_nn", H200, rows)]).columns
    rows = [row._replace(times=dict.fromkeys(configs[:5], 1.0)) for row in rows]
    with pytest.raises(TuningError, match="too few"):
        train.usable(Sweep("bf16_nn", H200, rows))


def test_candidates_known_and_per_size(monkeypatch):
    monkeypatch.setattr(choosing, "WorkerPool", ThreadPoolExecutor)
    monkeypatch.setattr(choosing, "likely", likely)
    found, _ = gpu_tables.predictor("bf16_nt", H200)
    known = found.configs("bf16_nt")[:50]
    shipped, *_ = gpu_tables.shipped(H200)
    deep = MatmulProblem(1, 48, 64, 25600, "bfloat16", "bfloat16", b_layout="column")
    problems = [*drawn("bf16_nt", 2, "candidates"), deep]
    found = choosing.candidates("bf16_nt", problems, H200, known, [shipped], 150)
    assert {sweep.banded(config) for config in known} <= set(found)
    assert len(set(found)) == len(found) == 150
    few = choosing.candidates("bf16_nt", problems, H200, [], [], 20)
    assert len(few) == 20
    for problem in problems:
        times = likely(problem, H200)
        assert min(times[config] for config in few if config in times) == min(times.values())
    assert any(dict(config.kwargs).get("SPLIT_K", 1) > 1 for config in few)


# --- What is timed at a size ---


def test_kind_errors_are_learnt():
    found, _ = gpu_tables.predictor("bf16_nt", H200)
    chooser = sweep.Chooser(found.configs("bf16_nt"), H200)

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


# --- Training ---


@functools.cache
def by_law(count):
    """A sweep whose times are a law: each config's roofline by a factor, which grows or shrinks with K.

    Return the rooflines too.
    """
    dice, rows, rooflines = random.Random(3), [], []
    aligned = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
    some = [
        config for config in some_configs(aligned, H200, 60) if choosing.is_candidate(config, "bf16_nt", H200)
    ]
    configs = list(dict.fromkeys(map(sweep.banded, some)))[::3]
    laws = {config: (dice.uniform(-0.3, 0.3), dice.uniform(-0.2, 0.2)) for config in configs}
    for problem in drawn("bf16_nt", count, "law"):
        own = [config for config in configs if illegal(config, problem, H200) is None]
        made = inputs.of_product(problem, inputs.tiles_of(own, problem, H200), H200)
        rooflines.append(dict(zip(own, made.roofline.tolist(), strict=True)))
        deep = math.log2(problem.k / 1024)
        us = {
            config: us * math.exp(laws[config][0] + laws[config][1] * deep + dice.gauss(0, 0.01))
            for config, us in rooflines[-1].items()
        }
        rows.append(Row(problem, us, 0.9 * made.torch_roofline * math.exp(0.1 * deep)))
    return Sweep("bf16_nt", H200, rows), rooflines


def test_a_law_is_found_again():
    """Picks at sizes left out lose little, where those by rooflines alone lose much."""
    swept, _ = by_law(100)
    samples = train.Samples([swept])
    found = train.held_out(samples, 0, 150)
    assert sorted(pick.size.problem.label for pick in found) == sorted(
        row.problem.label for row in swept.rows
    )
    loss = train.loss_of(found)
    assert loss.sizes == 100
    assert loss.mean < 0.03
    assert loss.p95 < 0.15
    assert 0 < loss.torch < 0.15
    plain = []
    for size in samples.sizes:
        own = np.where(np.isnan(size.us), np.inf, size.inputs.roofline).argmin()
        plain.append(size.us[own] / size.fastest - 1)
    assert np.mean(plain) > 5 * loss.mean
    by_torch = [each for each in found if each.us == each.size.torch_us]
    assert 0 < len(by_torch) < len(found)  # it is picked where it is predicted to be faster
    assert np.mean([each.us <= each.own_us for each in by_torch]) > 0.8


def test_training_is_deterministic(hasty):
    swept, _ = by_law(40)
    samples = train.Samples([swept])
    one, again, other = (train.trained(samples, range(40), seed, 12) for seed in (0, 0, 1))
    arrays = [[getattr(each, of.name) for of in fields(Network)] for each in (one, again, other)]
    assert all(np.array_equal(*pair) for pair in zip(arrays[0], arrays[1], strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(arrays[0], arrays[2], strict=True))
    first, second = (train.fitted([swept], {"torch": "1"}) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert first.versions == {"torch": "1"}
    assert first.is_current_class("bf16_nt")


def test_untimed_config_is_not_fast():
    """It was timed where it is fast, and is not picked where it was not timed, for lack of data."""
    swept, rooflines = by_law(100)
    config = Counter(min(each, key=each.get) for each in rooflines).most_common(1)[0][0]
    rows = []
    for row in swept.rows:
        others = {each: us for each, us in row.times.items() if each != config}
        own = {config: 0.7 * min(others.values())} if config in row.times and row.problem.k < 1024 else {}
        rows.append(row._replace(times=others | own, torch_us=None))
    samples = train.Samples([swept._replace(rows=rows)])
    found = train.made_of(samples, train.networks_of(samples, None, 300), {}, {}, {})
    ratios = {True: [], False: []}
    for row in rows:
        if config not in row.times and row.problem.k < 2048:  # next to where it is fast
            continue
        times = found.times("bf16_nt", row.problem, H200).us
        us = dict(zip(found.configs("bf16_nt"), times, strict=True))
        least = min(us[each] for each in row.times if each != config)
        ratios[config in row.times].append(us[config] / least)
    there, elsewhere = map(np.array, (ratios[True], ratios[False]))
    assert min(len(there), len(elsewhere)) > 15
    assert np.mean(there < 0.9) > 0.9
    assert np.mean(elsewhere > 1) > 0.9


def test_hiccups_are_dropped():
    swept, rooflines = by_law(40)
    row, *rest = swept.rows
    one, two, *_ = row.times
    off = {config: us / rooflines[0][config] for config, us in row.times.items()}
    middle = statistics.median(off.values())
    times = row.times | {
        one: row.times[one] * 4 * middle / off[one],
        two: row.times[two] * 2 * middle / off[two],
    }
    found = train.usable(swept._replace(rows=[row._replace(times=times), *rest]))
    assert one not in found.rows[0].times
    assert found.rows[0].times.items() <= times.items()
    assert two in found.rows[0].times
    assert train.usable(swept).rows == swept.rows


def test_few_sizes_are_left_out():
    """Of a size with few configs nothing is learnt; of a class with few sizes neither."""
    swept, _ = by_law(40)
    rows = [row._replace(times=dict(list(row.times.items())[:4])) if i % 2 else row
            for i, row in enumerate(swept.rows)]  # fmt: skip
    assert train.usable(swept._replace(rows=rows)).rows == swept.rows[::2]
    with pytest.raises(TuningError, match="3 sizes were timed, too few"):
        train.usable(swept._replace(rows=rows[:6]))


def test_size_with_no_column_of_its_own(monkeypatch, hasty):
    """The configs that are kept cover nearly all sizes; other sizes do not end training."""
    swept, _ = by_law(40)
    row, *rest = swept.rows
    alone = [warpgroups(128, n, 64, 2, 4, subtiles=2) for n in (32, 64, 96, 128, 160)]
    known = {config for each in swept.rows for config in each.times}
    assert not known.intersection(alone)
    monkeypatch.setattr(train, "_CONFIGS", 1)
    rows = [row._replace(times=dict.fromkeys(alone, 100.0)), *rest]
    found = train.fitted([swept._replace(rows=rows)], {})
    (us, _), *_ = found.ranked("bf16_nt", row.problem, H200, 1)
    assert math.isfinite(us)


def test_predictor_of_permutations_loses_little(timed):
    problems = drawn(NAME, 60, "sizes")
    chooser = sweep.ready(problems, few_candidates(20), H200, print)
    rows = list(sweep.sweep(problems, chooser, H200, print))
    samples = train.Samples([Sweep(NAME, H200, rows)])
    loss = train.loss_of(train.held_out(samples, 0, 120))
    assert loss.sizes == len(samples.sizes) > 20
    assert loss.mean < 0.05
    assert loss.torch == 0.0  # torch is no candidate, though it was timed


# --- Sweeps as files ---


def swept(name, count=8):
    """A few sizes of a class, timed by nothing."""
    configs = few_candidates(12, name)
    problems = drawn(name, count, "sizes")
    legal = ((each, [c for c in configs if illegal(c, each, H200) is None]) for each in problems)
    return [Row(each, {config: clock(config, each) for config in own}, 7.0) for each, own in legal]


def test_sweep_from_its_file(tmp_path):
    rows, path = swept(NAME), tmp_path / "sweeps" / f"{NAME}.jsonl"
    write_sweep(path, rows, H200)
    read = read_sweep(path)
    assert (read.name, read.device, read.is_current) == (NAME, H200, True)
    assert [row.problem for row in read.rows] == [row.problem for row in rows]
    for one, other in zip(rows, read.rows, strict=True):
        assert other.times == pytest.approx(one.times, rel=1e-4)
        assert other.torch_us == one.torch_us
    newer = [Row(rows[0].problem, {next(iter(rows[0].times)): 1.0}), *swept(NAME, 9)[8:]]
    both = joined(rows, newer)
    assert len(both) == 9
    assert both[0].times == rows[0].times | newer[0].times
    assert both[0].torch_us == 7.0


def line(number, **changes):
    return lambda lines: lines[number].update(changes)


WRONG = {
    "nothing": lambda lines: lines.clear(),
    "no configs": lambda lines: lines[0].pop("configs"),
    "no device": lambda lines: lines[0].pop("device"),
    "another device": line(0, device={"name": "x"}),
    "another config": line(0, configs=[3]),
    "no times": lambda lines: lines[1].pop("us"),
    "no time of torch": lambda lines: lines[1].pop("torch_us"),
    "a number for a line": lambda lines: lines.insert(1, 3),
    "problem": line(1, problem="x"),
    "empty problem": line(1, problem={}),
    "times": line(1, us=3),
    "place beyond": line(1, us={"999": 1.0}),
    "place before": line(1, us={"-1": 1.0}),
    "no place": line(1, us={"x": 1.0}),
    "null": line(1, us={"0": None}),
    "zero": line(1, us={"0": 0.0}),
    "negative": line(1, us={"0": -1.0}),
    "NaN": line(1, us={"0": math.nan}),
    "infinity": line(1, us={"0": math.inf}),
    "torch NaN": line(1, torch_us=math.nan),
    "torch negative": line(1, torch_us=-1.0),
    "torch text": line(1, torch_us="x"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_damaged_sweep_is_refused(change, tmp_path):
    path = tmp_path / f"{NAME}.jsonl"
    write_sweep(path, swept(NAME), H200)
    lines = list(map(json.loads, path.read_text().splitlines()))
    change(lines)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(FileError, match="is not a sweep"):
        read_sweep(path)


def test_cut_sweeps_are_refused(tmp_path):
    path, packed = tmp_path / f"{NAME}.jsonl", tmp_path / f"{NAME}.jsonl.gz"
    write_sweep(path, swept(NAME), H200)
    whole = gzip.compress(path.read_bytes())
    packed.write_bytes(whole)
    assert read_sweep(packed) == read_sweep(path)
    for file, raw in (
        (packed, whole[: len(whole) // 2]),
        (packed, whole[:30] + b"damaged" + whole[37:]),
        (path, b'{"device'),
        (path, b"[" * 99999),
    ):
        file.write_bytes(raw)
        with pytest.raises(FileError, match="is not a sweep"):
            read_sweep(file)


# --- tritile tune --calibrate ---


@pytest.fixture
def few(timed, hasty, monkeypatch):
    """Calibrates with twelve configs; every time that was asked for."""
    monkeypatch.setattr(
        calibrating, "candidates", lambda name, problems, device, *rest: few_candidates(12, name, device)
    )
    return timed


def calibrate(folder, *names, sizes=12, seconds=math.inf, device=H200):
    """Calibrate, with sweeps and predictors in a folder; return the predictors."""
    return calibrating.calibrate(names or [NAME], device, sizes, 6, seconds, folder, folder / "sweeps")


def rows_of(folder, name=NAME):
    return {row.problem: row for row in read_sweep(folder / "sweeps" / f"{name}.jsonl").rows}


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
    for each in lines:
        of = problem_from_dict(each["problem"])
        assert each["torch_us"] == 7.0
        for place, us in each["us"].items():
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
    (made,) = calibrate(tmp_path, NAME, "permute_4")
    assert set(made.classes) == {NAME, "permute_4"}


def test_classes_for_this_gpu(few, tmp_path, capsys):
    assert calibrating.classes_of(["all"]) == list(calibrating.MEASURED)
    assert calibrating.classes_of(["fp8", "fp8"]) == ["fp8"]
    for names in (["halves"], ["bf16_nn", "none"]):
        with pytest.raises(InvalidValueError, match="bf16_nn"):
            calibrating.classes_of(names)
    (made,) = calibrate(tmp_path, NAME, "fp8", device=A100)
    assert "fp8 is left out: no config" in capsys.readouterr().err
    assert made.classes.keys() == {NAME}
    assert [each["name"] for each in made.devices] == [A100.name]
    with pytest.raises(UnsupportedError, match="runs none of fp8"):
        calibrate(tmp_path, "fp8", device=A100)


def test_sweeps_add_up(few, tmp_path, monkeypatch):
    """What is there of these kernels and this GPU stays; of others it is dropped."""
    path = tmp_path / "sweeps" / f"{NAME}.jsonl"
    monkeypatch.setattr(calibrating, "time", SimpleNamespace(monotonic=lambda: len(few)))  # a second a size
    calibrate(tmp_path, seconds=6)
    first = rows_of(tmp_path)
    assert 0 < len(first) < 10
    once = next(iter(first))
    config = few_candidates(13)[-1]
    write_sweep(path, joined([*first.values()], [Row(once, {config: 5.0})]), H200)
    (made,) = calibrate(tmp_path)
    both = rows_of(tmp_path)
    assert first.keys() < both.keys()
    assert both[once].times[config] == 5.0
    assert made.classes[NAME].loss.sizes == len(both)
    for key, change in (
        ("kernels", lambda kernels: dict.fromkeys(kernels, "0" * 16)),
        ("device", lambda device: device | {"name": "NVIDIA X1"}),
    ):
        calibrate(tmp_path)
        head, *lines = path.read_text().splitlines()
        data = json.loads(head)
        data[key] = change(data[key])
        path.write_text("\n".join([json.dumps(data), *lines]) + "\n")
        calibrate(tmp_path, seconds=6)
        assert rows_of(tmp_path).keys() == first.keys()
        assert read_sweep(path).device.name == H200.name
        assert read_sweep(path).is_current


def test_products_and_permutations_apart(few, tmp_path):
    """By all that was swept of each, now or before."""
    write_sweep(tmp_path / "sweeps" / "permute_4.jsonl", swept("permute_4"), H200)
    write_sweep(tmp_path / "sweeps" / "permute_8.jsonl", swept("permute_8", 3), H200)  # too few
    write_sweep(tmp_path / "sweeps" / "int4.jsonl", swept("int4"), H200)
    products, permutations = calibrate(tmp_path, "int4", NAME)
    assert products.classes.keys() == {"int4"}
    assert permutations.classes.keys() == {NAME, "permute_4"}
    for what, found in (("products", products), ("permutations", permutations)):
        read = predictor.read(tmp_path / gpu_tables.calibrated_path(H200, what).name)
        assert read.classes == found.classes
        assert all(read.is_current_class(name) for name in read.classes)
        assert {label.partition("/")[0] for label in read.kernels} == (
            {"linear_quantized"} if what == "products" else {"permute"}
        )


def test_damaged_sweep_is_replaced(few, tmp_path, capsys):
    path = tmp_path / "sweeps" / f"{NAME}.jsonl"
    path.parent.mkdir()
    other = path.with_name("permute_4.jsonl")
    for each in (path, other):
        each.write_text('{"device": ')
    (made,) = calibrate(tmp_path)
    said = capsys.readouterr().err
    assert f"{path} is not a sweep" in " ".join(said.split())
    assert f"{other} is not a sweep" in " ".join(said.split())
    assert made.classes.keys() == {NAME}
    assert len(rows_of(tmp_path)) > 4
    assert other.read_text() == '{"device": '  # nothing was timed of it


def test_a_class_that_cannot_be_trained_is_left_out(few, tmp_path, capsys):
    """One whose sizes have few configs does not keep others from being trained."""
    rows = [row._replace(times=dict(list(row.times.items())[:4])) for row in swept("permute_4")]
    write_sweep(tmp_path / "sweeps" / "permute_4.jsonl", rows, H200)
    (made,) = calibrate(tmp_path)
    assert made.classes.keys() == {NAME}
    assert "permute_4" in capsys.readouterr().err


def test_sweep_of_another_class(few, tmp_path, capsys):
    """A file that was renamed is told of, and nothing is learnt of it."""
    write_sweep(tmp_path / "sweeps" / "permute_4.jsonl", swept("int4"), H200)
    (made,) = calibrate(tmp_path)
    assert made.classes.keys() == {NAME}
    assert "permute_4" in capsys.readouterr().err


def test_too_few_sizes(few, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrating, "time", SimpleNamespace(monotonic=lambda: len(few)))
    assert calibrate(tmp_path, seconds=1) == []
    assert "permutations: too few sizes were timed" in capsys.readouterr().err
    assert rows_of(tmp_path)
    assert not list(tmp_path.glob("*.predictor.json"))
