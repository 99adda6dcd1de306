"""What is planned at sizes that nobody measured: classes, predictors, their files, and plans by them."""

import functools
import itertools
import json
import math
import random
import re
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest

import train as shipping
from tests.configs import tma
from tests.predictors import MOST, PREFERRED, made, network, some_configs
from tests.unit.conftest import forget_tables
from tests.warned import one_warning
from tritile.choose import aten, gpu_tables, pick, predictor, waves
from tritile.choose.classes import MEASURED, class_of
from tritile.choose.predictor import ABSURD, RACED, Network
from tritile.cli import findings
from tritile.core import settings
from tritile.core.device import TARGETS, Device, target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.errors import NotTunedError, StoreWarning, UnsupportedError, UntunedWarning
from tritile.families.fp16x3.lowering import suits_fp16x3
from tritile.families.space import illegal
from tritile.nn.exchanged import PARTS_AHEAD
from tritile.ops import request as ops_request
from tritile.tune.calibrate.draw import DRAWS, drawn
from tritile.tune.calibrate.files import read_sweep
from tritile.tune.calibrate.sweep import useful

H200 = target_device("nvidia-h200")
A100 = target_device("sm_80")
PRODUCT = MatmulProblem(1, 777, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
PACKED = QuantizedProblem(100, 2048, 4096, "bfloat16", 4, 128)
TAKEN = {  # of whom other problems take the class
    "bf16_nn": [
        {"dtype": "float16", "out_dtype": "float16", "b_layout": "row"},
        {"b_layout": "row", "batch": 8},
        {"b_layout": "row", "a_layout": "column"},
        {"b_layout": "row", "epilogue": "bias=row gelu"},
    ],
    "bf16_nt": [{}, {"a_layout": "column"}, {"m": 1}, {"out_dtype": "float32"}, {"invariant": True}],
    "unaligned_16bit": [
        {"a_align": 8},
        {"b_align": 2},
        {"out_align": 4},
        {"a_layout": "strided", "a_align": 2},
    ],
    "fp16x3": [{"dtype": "float32", "out_dtype": "float32", "precision": "fp16x3"}],
    "fp8": [{"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2", "b_dtype": "float8_e4m3fn"}],
    "int8": [{"dtype": "int8", "out_dtype": "int32"}],
}
PERMUTED = {
    **{f"permute_{size}": PermuteProblem.transposed(3, 300, 500, size) for size in (1, 2, 4, 8, 16)},
    "inner_dim_kept": PermuteProblem.of((5, 7, 640), (640, 3200, 1), (4480, 640, 1), 2, widen=False),
}
UNSERVED = [
    replace(PRODUCT, dtype="float64", out_dtype="float64"),
    replace(PRODUCT, dtype="float32", out_dtype="float32"),
    replace(PRODUCT, dtype="float32", out_dtype="float32", precision="tf32"),
    GroupedProblem(4, 100, 64, 64, "bfloat16", "bfloat16"),
]
OF_CLASS = {"bf16_nt": PRODUCT, "int4": PACKED, "permute_4": PERMUTED["permute_4"]}
HOPPER = {gpu: device for gpu, device in TARGETS.items() if device.nvidia == 90}
picked = functools.cache(waves.pick)  # which takes long


def of_class(name="bf16_nt", *devices, count=6, **options):
    device, *_ = devices or (H200,)
    return made(name, some_configs(OF_CLASS[name], device, count), *(devices or (H200,)), **options)


# --- Classes ---


@pytest.mark.parametrize("name", MEASURED)
def test_class_takes_its_draws(name):
    for problem in drawn(name, 100, "a test"):
        assert class_of(problem) == name
    for changes in TAKEN.get(name, ()):
        assert class_of(replace(PRODUCT, **changes)) == name, changes
    if name in PERMUTED:
        assert class_of(PERMUTED[name]) == name


def test_every_class_is_drawn_and_taken():
    assert set(MEASURED) == set(DRAWS) == {*TAKEN, *PERMUTED, "int4"}
    assert drawn("fp8", 5, "a") == drawn("fp8", 5, "a") != drawn("fp8", 5, "b")


@pytest.mark.parametrize("problem", UNSERVED, ids=lambda problem: problem.label)
def test_what_no_class_serves(problem):
    assert class_of(problem) is None
    assert pick.by_predictor(problem, H200) is None
    assert pick.candidates(problem, H200, True) == []
    assert pick.likely(problem, H200, RACED) == []


# --- Ranking ---


@pytest.mark.parametrize("name", OF_CLASS)
def test_ranked_is_legal_and_ordered(name):
    problem = OF_CLASS[name]
    found = of_class(name, count=20)
    ranked = found.ranked(name, problem, H200, 30)
    times = found.times(name, problem, H200)
    assert len(ranked) == len(found.configs(name))
    assert sorted(us for us, _ in ranked) == pytest.approx(sorted(times.us))
    sane = {c for c, us in zip(found.configs(name), times.roofline, strict=True)
            if us <= ABSURD * times.roofline.min()}  # fmt: skip
    first = sane.intersection(useful(found.configs(name), problem, H200))
    assert {config for _, config in ranked[: len(first)]} == first
    assert [us for us, _ in ranked[: len(first)]] == sorted(us for us, _ in ranked[: len(first)])
    assert found.ranked(name, problem, H200, 2) == ranked[:2]


def test_illegal_configs_are_not_ranked():
    split, short = tma(64, 64, 128, 4, 4, split=64), replace(PRODUCT, k=128)
    configs = (split, *some_configs(PRODUCT, H200, 6))
    found = made("bf16_nt", configs, H200, more=[PREFERRED])
    assert illegal(split, short, H200) is not None
    assert split not in [config for _, config in found.ranked("bf16_nt", short, H200, 30)]
    (_, first), *_ = found.ranked("bf16_nt", replace(PRODUCT, m=64, n=64, k=1 << 16), H200, 1)
    assert first == split
    alone = made("bf16_nt", (split,), H200)
    assert alone.ranked("bf16_nt", short, H200, 5) == []


def test_configs_that_others_dominate_come_last():
    """A sweep does not time them, and their predictions may be far too low: few rows in a tall tile."""
    found, _ = gpu_tables.predictor("bf16_nn", H200)
    configs = found.configs("bf16_nn")
    few = replace(PRODUCT, m=2, n=640, k=15488, b_layout="row")
    own = set(useful(configs, few, H200))
    worse = [config for config in configs if config not in own]
    loving = made("bf16_nn", configs, H200, more=[0.0 if config in own else -3.0 for config in configs])
    ranked = [config for _, config in loving.ranked("bf16_nn", few, H200, len(configs))]
    assert ranked[0] in own
    assert worse
    last = made("bf16_nn", worse, H200)
    assert len(last.ranked("bf16_nn", few, H200, 1)) == 1  # for want of others


@functools.cache
def columns(name):
    found, _ = gpu_tables.predictor(name, H200)
    return found.configs(name)


SMALL = MatmulProblem(1, 16, 8, 8192, "bfloat16", "bfloat16")  # each config is absurd, or dominated


@pytest.mark.parametrize(
    ("name", "changes", "more"),
    [
        ("bf16_nn", {}, [SMALL]),
        ("bf16_nt", {}, [replace(SMALL, b_layout="column")]),
        ("bf16_nn", {"invariant": True}, []),  # those that split K may not run
        ("bf16_nt", {"invariant": True}, []),
        ("fp16x3", {}, []),
        ("unaligned_16bit", {}, []),
        ("int4", {}, []),
        ("permute_2", {}, []),
    ],
)
def test_what_a_roofline_holds_for_absurd_is_never_picked(name, changes, more):
    """However much a network loves it."""
    configs = columns(name)
    plain, loved = made(name, configs, H200), 0
    for problem in [*(replace(each, **changes) for each in drawn(name, 25, "absurd")), *more]:
        legal = np.array([illegal(config, problem, H200) is None for config in configs])
        roofline = plain.times(name, problem, H200).roofline
        absurd = roofline > ABSURD * roofline[legal].min()
        net = network(MEASURED[name].op, len(configs), more=np.where(absurd, PREFERRED, 0.0))
        (_, config), *_ = replace(plain, networks=(net,)).ranked(name, problem, H200, 1)
        assert not absurd[configs.index(config)], problem.label
        loved += absurd.any()
    assert loved


# --- torch ---


@pytest.fixture
def ship(folder, tmp_path, monkeypatch):
    """Ships predictors in place of all that ships: predictors, or files as text."""

    def shipped(found, what="products"):
        path = folder / f"{what}.predictor.json"
        if isinstance(found, str):
            path.write_text(found)
        else:
            predictor.write(found, path)
        forget_tables()

    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(waves, "pick", picked)
    return shipped


ODD = replace(PRODUCT, n=4099, k=4099, a_align=2, b_align=2, out_align=2)
INT8 = replace(PRODUCT, dtype="int8", out_dtype="int32")


@pytest.mark.parametrize(
    ("name", "problem", "is_erratic"),
    [("bf16_nt", PRODUCT, False), ("unaligned_16bit", ODD, True), ("int8", INT8, True)],
)
def test_torch_beyond_the_sweeps(name, problem, is_erratic, ship):
    """Of some classes its time at larger sizes goes wrong, so it does not run there."""
    configs = some_configs(problem, H200, 6)
    ship(made(name, configs, H200, more=[0.0] * len(configs) + [PREFERRED]))
    assert problem.flops < MOST
    plan = pick.plan_for(problem, H200, "cached", True)
    assert plan.config == aten.CONFIG == pick.candidates(problem, H200, True)[0][1]
    assert pick.plan_for(problem, H200, "cached", False).config in configs
    large = replace(problem, m=1 + int(MOST / 2 / problem.n / problem.k))
    plan = pick.plan_for(large, H200, "cached", True)
    assert (plan.config == aten.CONFIG) == (not is_erratic)
    assert not is_erratic or "may take far longer" in plan.other
    found = [config for _, config in pick.candidates(large, H200, True)]
    assert (aten.CONFIG in found) == (not is_erratic)
    assert 1 < len(found) <= 5


def test_torch_untimed_is_no_candidate():
    found = of_class(more=[0.0] * 6 + [PREFERRED])
    own = found.classes["bf16_nt"]
    untimed = replace(found, classes={"bf16_nt": own._replace(loss=own.loss._replace(torch=0.0))})
    assert found.torch_us("bf16_nt", PRODUCT, H200) > 0
    assert untimed.torch_us("bf16_nt", PRODUCT, H200) is None
    permuted = of_class("permute_4")
    assert permuted.torch_us("permute_4", PERMUTED["permute_4"], H200) is None


# --- Files ---


@pytest.mark.parametrize("name", OF_CLASS)
def test_predictor_from_its_file(name, tmp_path):
    found, path = of_class(name), tmp_path / "predictor.json"
    predictor.write(found, path)
    read = predictor.read(path)
    for problem in (OF_CLASS[name], *drawn(name, 20, "read")):
        one, other = (each.times(name, problem, H200) for each in (found, read))
        assert other.us == pytest.approx(one.us, rel=5e-4)
        assert other.torch_us == pytest.approx(one.torch_us, rel=5e-4)
    assert (read.columns, read.classes, read.versions) == (found.columns, found.classes, found.versions)
    assert read.is_current_class(name)
    predictor.write(read, tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()
    stale = replace(read, kernels=dict.fromkeys(read.kernels, "0" * 16))
    assert not stale.is_current_class(name)


@functools.cache
def text_of(name):
    return json.dumps(of_class(name, networks=1).to_dict())


def at(*path, to):
    """A change of what lies at a path."""

    def change(data):
        *most, last = path
        functools.reduce(lambda inner, key: inner[key], most, data)[last] = to

    return change


NET = "networks", 0
CLASS = "classes", "bf16_nt"
KWARGS = "columns", 2, "kwargs"
DAMAGES = {
    "format": at("format", to=2),
    "no format": lambda d: d.pop("format"),
    "NaN": at(*NET, "own", 1, 1, to=math.nan),
    "infinity": at(*NET, "shared", 1, 1, to=math.inf),
    "minus infinity": at(*NET, "weights", 1, 0, to=-math.inf),
    "too large": at(*NET, "weights", 1, 0, to=1e30),
    "a whole number that no float holds": at(*NET, "weights", 1, 0, to=10**400),
    "null": at(*NET, "second", 1, 1, to=None),
    "text": at(*NET, "second", 1, 1, to="one"),
    "fewer rows": lambda d: d["networks"][0]["tiles"].pop(),
    "rows of two lengths": lambda d: d["networks"][0]["tiles"][3].pop(),
    "a number for an array": at(*NET, "start", to=0.0),
    "no array": lambda d: d["networks"][0].pop("second"),
    "another array": at(*NET, "third", to=[[0.0]]),
    "no networks": at("networks", to=[]),
    "no spread": at(*NET, "tiles_scale", 1, 3, to=0.0),
    "a negative spread": at(*NET, "tiles_scale", 1, 3, to=-1.0),
    "column beyond": at(*CLASS, "columns", 0, to=6),
    "column below": at(*CLASS, "columns", 0, to=-1),
    "column twice": at(*CLASS, "columns", 0, to=1),
    "column no number": at(*CLASS, "columns", 0, to=None),
    "no columns": at(*CLASS, "columns", to=[]),
    "more columns than weights": lambda d: d["columns"].append(d["columns"][0]),
    "unknown class": lambda d: d["classes"].update(none=d["classes"]["bf16_nt"]),
    "class of another operation": lambda d: d["classes"].update(permute_4=d["classes"]["bf16_nt"]),
    "no classes": at("classes", to={}),
    "no loss": lambda d: d["classes"]["bf16_nt"].pop("loss"),
    "a part of a loss": lambda d: d["classes"]["bf16_nt"]["loss"].pop("p95"),
    "a loss of no size": at(*CLASS, "loss", "sizes", to=0),
    "a loss without end": at(*CLASS, "loss", "mean", to=math.inf),
    "no most": lambda d: d["classes"]["bf16_nt"].pop("most"),
    "unknown family": at("columns", 2, "family", to="none"),
    "family of another operation": at("columns", 2, "family", to="box"),
    "no block": lambda d: d["columns"][2]["kwargs"].pop("BLOCK_K"),
    "a block of nothing": at(*KWARGS, "BLOCK_K", to=0),
    "a flag for a block": at(*KWARGS, "GROUP_M", to=False),
    "no warps": at("columns", 2, "num_warps", to=0),
    "no GPUs of a class": lambda d: d["classes"]["bf16_nt"].pop("gpus"),
    "no devices": lambda d: d.pop("devices"),
    "a GPU without a name": lambda d: d["devices"][0].pop("name"),
    "a GPU without memory": at("devices", 0, "memory_gbps", to=0),
    "kernels": at("kernels", to=3),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_predictor_is_not_used(how, ship):
    data = json.loads(text_of("bf16_nt"))
    DAMAGES[how](data)
    ship(json.dumps(data).replace("Infinity", "1e999"))
    with one_warning("a predictor is not used"):
        assert pick.plan_for(PRODUCT, H200, "cached", True).source == "torch"
        assert pick.plan_for(PRODUCT, H200, "cached", False).source == "model"
        assert pick.plan_for(PACKED, H200, "cached", True).source == "model"  # the same file
    assert pick.candidates(PRODUCT, H200, True) == []


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, "\0", '{"format": 1}'])
def test_what_is_no_predictor_is_not_used(text, ship):
    ship(text, "permutations")
    problem = PERMUTED["permute_4"]
    with one_warning("a predictor is not used"):
        assert pick.plan_for(problem, H200, "cached").source == "model"
    path = gpu_tables.calibrated_path(H200, "permutations")
    path.parent.mkdir(exist_ok=True)
    predictor.write(of_class("permute_4"), path)
    forget_tables()
    assert pick.plan_for(problem, H200, "cached").source == "predicted"
    ship(of_class("permute_4"), "permutations")
    path.write_text(text)
    forget_tables()
    with one_warning("a predictor is not used"):  # then what ships serves
        plan = pick.plan_for(problem, H200, "cached")
    assert plan.source == "predicted"
    assert "measured here" not in plan.why


WRONG = (
    None, True, False, "", "x", [], {}, [[1.0]], -1, 0, 1, 3, 0.5, 1e-320, 1e6, -1e6, 1e30, 1 << 40, 10**400,
    math.nan, math.inf, -math.inf,
)  # fmt: skip


def damage(data, dice):
    """Replace, or drop, something anywhere."""
    while True:
        key = dice.choice(list(data) if isinstance(data, dict) else range(len(data)))
        if not isinstance(data[key], list | dict) or not data[key] or dice.random() < 0.15:
            break
        data = data[key]
    if dice.random() < 0.2:
        del data[key]
    else:
        data[key] = dice.choice(WRONG)


@pytest.mark.parametrize("name", OF_CLASS)
def test_any_damage_is_refused_or_harmless(name, ship):
    """What is planned is finite and legal, with one warning at most, and none of numpy's."""
    problem, dice, refused = OF_CLASS[name], random.Random(name), 0
    what, text = gpu_tables.what_of(name), text_of(name)
    for _ in range(150):
        data = json.loads(text)
        damage(data, dice)
        ship(json.dumps(data).replace("Infinity", "1e999"), what)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = pick.plan_for(problem, H200, "cached", True)
            assert str(plan)
        assert [each.category for each in caught] == [StoreWarning] * len(caught)
        assert len(caught) <= 1
        if caught:
            refused += 1
            assert plan.source != "predicted"
        if plan.source == "predicted":
            assert 0 < plan.us < math.inf
            assert plan.config == aten.CONFIG or illegal(plan.config, problem, H200) is None
    assert refused > 20


def test_large_numbers_predict_finite_times(tmp_path):
    """Of a network with the largest numbers that a file may hold."""
    for size in (1e6, -1e6):
        found = of_class(networks=1)
        numbers = {
            each.name: np.full_like(getattr(found.networks[0], each.name), size)
            for each in fields(Network)
            if not each.name.endswith("_scale")
        }
        predictor.write(replace(found, networks=(replace(found.networks[0], **numbers),)), tmp_path / "p")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            times = predictor.read(tmp_path / "p").times("bf16_nt", PRODUCT, H200)
        assert np.isfinite(times.us).all()
        assert (times.us > 0).all()


def test_file_of_another_gpu_with_that_name(ship):
    """Names of several GPUs may become one file name; what was trained here is of one of them."""
    other = replace(H200, name="NVIDIA-H200")
    assert other.slug == H200.slug
    path = gpu_tables.calibrated_path(H200, "products")
    path.parent.mkdir(exist_ok=True)
    predictor.write(of_class("bf16_nt", other), path)
    assert gpu_tables.predictor("bf16_nt", other) is not None
    assert gpu_tables.predictor("bf16_nt", H200) is None


# --- Plans ---


def test_plan_says_prediction_quality():
    plan = pick.plan_for(replace(PRODUCT, m=779), H200, "cached")
    found, _ = gpu_tables.predictor("bf16_nt", H200)
    (us, config), (second, _) = found.ranked("bf16_nt", plan.problem, H200, 2)
    assert (plan.source, plan.config, plan.us) == ("predicted", config, us)
    loss = found.classes["bf16_nt"].loss
    said = f"{second / us:.3f} times", f"{loss.mean:.1%}", f"{loss.p95:.1%}", f"{loss.sizes} held-out"
    assert all(text in plan.why for text in (*said, "bf16_nt", f"measured on {H200.name}"))
    assert pick.plan_for(plan.problem, H200, "off").source == "model"


def test_plan_prints_its_candidates(ship):
    ship(of_class(more=[0.0] * 6 + [2.0]))
    plan = pick.plan_for(PRODUCT, H200, "cached", True)
    with settings.mode(backends="triton,aten"):
        found = plan.candidates
    assert len(found) == 5
    assert [us for us, _ in found] == sorted(us for us, _ in found)
    assert found[0] == (plan.us, plan.config)
    assert all(f"{us:.1f} us" in str(plan) for us, _ in found[:2])
    assert pick.on_host(PRODUCT).candidates == ()


def test_similar_gpu_takes_predictor():
    alike = replace(H200, name="NVIDIA H200 of a name of its own", memory_gbps=4400)
    plan = pick.plan_for(PRODUCT, alike, "cached")
    assert plan.source == "predicted"
    assert "measured on a similar GPU, NVIDIA H200" in plan.why
    assert gpu_tables.shipped(alike)[0] is gpu_tables.shipped(H200)[0]
    nearer = replace(alike, memory_gbps=3400)
    assert "measured on a similar GPU, NVIDIA H100" in pick.plan_for(PRODUCT, nearer, "cached").why
    for other in (
        replace(A100, name="another A100"), replace(alike, memory_gbps=2000), replace(alike, arch=100),
    ):  # fmt: skip
        assert not gpu_tables.like(other)
        assert not gpu_tables.is_calibrated(other)
        assert pick.plan_for(PERMUTED["permute_2"], other, "cached").source == "model"


def test_fewer_sms_predictions_only():
    alike = replace(H200, name="NVIDIA H200 of fewer SMs", processors=78)
    measured = next(
        entry.problem
        for entry in gpu_tables.shipped(H200)[0].entries
        if class_of(entry.problem) == "bf16_nt" and pick.tabled(entry.problem, H200)
    )
    assert pick.plan_for(measured, H200, "cached").source == "table"
    assert pick.plan_for(measured, alike, "cached").source == "predicted"
    assert not gpu_tables.shipped(alike)


def test_class_without_predictor_modelled(ship):
    plan = pick.plan_for(PRODUCT, A100, "cached")
    assert (plan.source, plan.config) == ("model", picked(PRODUCT, A100))
    with pytest.raises(NotTunedError, match="no measurement covers"):
        pick.plan_for(PRODUCT, A100, "strict")
    assert pick.plan_for(PRODUCT, A100, "tune") is None  # it is to be measured
    assert pick.likely(PRODUCT, A100, RACED) == []
    assert not gpu_tables.is_calibrated(A100)
    found = findings._predictors(A100)
    assert found.found.startswith("none: bf16_nn, ")
    assert "--calibrate all" in found.advice
    ship(of_class("bf16_nt", A100))
    assert pick.plan_for(PRODUCT, A100, "strict").source == "predicted"
    assert gpu_tables.is_calibrated(A100)
    found = findings._predictors(A100)
    assert f"measured on {A100.name}: bf16_nt" in found.found
    assert not found.advice
    stale = of_class("bf16_nt", A100)
    ship(replace(stale, kernels=dict.fromkeys(stale.kernels, "0" * 16)))
    assert "another version of the kernel" in pick.plan_for(PRODUCT, A100, "cached").why
    with pytest.raises(NotTunedError, match="no measurement covers"):
        pick.plan_for(PRODUCT, A100, "strict")


@pytest.mark.parametrize("name", MEASURED)
def test_target_has_legal_pick(name):
    problem = drawn(name, 1, "any")[0]
    served = {gpu for gpu, device in TARGETS.items() if gpu_tables.predictor(name, device) is not None}
    assert served == set(HOPPER)
    for device in HOPPER.values():
        found, _ = gpu_tables.predictor(name, device)
        (_, config), *_ = found.ranked(name, problem, device, 1)
        assert illegal(config, problem, device) is None
        plan = pick.plan_for(problem, device, "cached")
        if plan.source == "predicted" and plan.config not in found.configs(name):
            assert f"{config} is predicted to take" in plan.why
        else:
            assert plan.config == config or plan.source == "table"


@pytest.mark.parametrize("name", MEASURED)
def test_plans_are_legal_and_finite(name):
    """On all GPUs that predictors serve, and on the others by turns."""
    others = itertools.cycle([device for gpu, device in TARGETS.items() if gpu not in HOPPER])
    for problem in drawn(name, 25, "plans"):
        for device in (*HOPPER.values(), next(others)):
            try:
                plan = pick.plan_for(problem, device, "cached", True)
            except UnsupportedError:
                assert name in ("fp16x3", "fp8")
                assert device.nvidia < 89
                continue
            if plan.config == aten.CONFIG:
                assert aten.illegal(problem) is None
            else:
                assert illegal(plan.config, problem, device) is None
            assert (plan.us is None) == (plan.source == "torch")
            assert all(0 < us < 1e8 for us in (plan.us, plan.other_us) if us is not None)


ODD_SIZES = (1, 2, 7, 17, 127, 1000, 4097)


def dense(shape, dims):
    """Strides of a tensor without gaps whose last of `dims` is contiguous."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(dims):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def test_plans_of_odd_sizes_are_legal_and_finite():
    dice, changes = random.Random(7), [each for name in TAKEN for each in TAKEN[name]]
    for _ in range(150):
        m, n, k = (dice.choice(ODD_SIZES) for _ in range(3))
        sides = {"m": m, "n": n, "k": k, "batch": dice.choice((1, 1, 3))}
        problem = replace(PRODUCT, **sides | dice.choice(changes))
        plan = pick.by_predictor(problem, H200)
        if plan is not None:
            assert illegal(plan.config, problem, H200) is None
            assert 0 < plan.us < 1e8
        assert all(0 < us < 1e8 for us, _ in pick.candidates(problem, H200, True))
    for _ in range(100):
        shape = tuple(dice.choice(ODD_SIZES[:5]) for _ in range(dice.randint(2, 4)))
        order = range(len(shape))
        strides = (dense(shape, dims) for dims in (dice.sample(order, len(shape)), order))
        problem = PermuteProblem.of(shape, *strides, dice.choice((1, 2, 4, 8, 16)), widen=False)
        plan = pick.by_predictor(problem, H200)
        assert illegal(plan.config, problem, H200) is None
        assert 0 < plan.us < 1e8


def test_unmeasured_gpu_told_once(ship, monkeypatch):
    monkeypatch.setattr(ops_request, "_warned", set())
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: (A100, H200)[index])

    def told(index, *problems):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sources = {ops_request.planned(problem, index).source for problem in problems}
        return sources, [str(each.message) for each in caught if each.category is UntunedWarning]

    with settings.mode("off"):
        assert told(0, PRODUCT) == ({"model"}, [])
    sources, (said,) = told(0, PRODUCT, UNSERVED[2])
    assert sources == {"model"}
    assert A100.name in said
    assert "tritile tune --calibrate all" in said
    assert told(0, replace(PRODUCT, m=5))[1] == []
    ship(of_class())
    assert told(1, PRODUCT, UNSERVED[2]) == ({"predicted", "model"}, [])  # some classes were measured


def test_no_faster_plan_next():
    """One that is dominated may be predicted to be faster: at the least sizes one is."""
    whys = [
        pick.by_predictor(MatmulProblem(1, m, n, k, "int8", "int8"), H200).why
        for m, n, k in itertools.product((1, 14, 58, 4096), repeat=3)
    ]
    found = [float(ratio) for why in whys for ratio in re.findall(r"predicted to take ([\d.]+) times", why)]
    assert 0 < len(found) < len(whys)
    assert min(found) >= 1.0


# --- The committed sweeps ---


def test_shipped_is_of_sweeps():
    for what in gpu_tables.WHAT:
        found = predictor.read(gpu_tables._folder() / f"{what}.predictor.json")
        assert len(found.networks) > 1
        assert {name for name in MEASURED if gpu_tables.what_of(name) == what} == set(found.classes)
        assert {each["name"] for each in found.devices} <= {
            table.device["name"] for table in gpu_tables.like(H200)
        }
        assert Device.from_dict(found.devices[0]).name == H200.name
        assert dict(found.versions) == shipping.VERSIONS
        assert (gpu_tables._folder() / f"{what}.predictor.json").stat().st_size < 1 << 20


def test_facts_of_committed_sweeps():
    """Of small files, as whether each config is legal takes long."""
    folder = shipping.ROOT / "sweeps"
    first, more = (read_sweep(folder / each / "inner_dim_kept.jsonl.gz").rows for each in ("", "more"))
    (both,) = shipping.read_all([folder / each / "inner_dim_kept.jsonl.gz" for each in ("", "more")])
    times = [{row.problem: row.times for row in rows} for rows in (first, more, both.rows)]
    assert times[2] == {each: times[0].get(each, {}) | times[1].get(each, {}) for each in times[0] | times[1]}

    swept = read_sweep(folder / "fp16x3.jsonl.gz")
    assert swept.device.name == H200.name
    found, _ = gpu_tables.predictor("fp16x3", H200)
    assert set(found.configs("fp16x3")) <= {config for row in swept.rows for config in row.times}
    assert found.classes["fp16x3"].loss.sizes <= len(swept.rows)
    parts = [row for row in swept.rows if suits_fp16x3(row.problem.m, row.problem.n, row.problem.k)]
    assert len(parts) >= 5  # where fp16 parts are the default, torch took twice as long
    assert all(row.torch_us > PARTS_AHEAD * min(row.times.values()) for row in parts)
