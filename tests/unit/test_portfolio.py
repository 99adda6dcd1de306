"""What is planned at sizes that nobody measured: classes, the formula of a time, portfolios in tables."""

import functools
import itertools
import json
import math
import random
import re
import warnings
from dataclasses import replace

import pytest
import torch

import portfolios
from tests.unit.conftest import forget_tables
from tritile.choose import gpu_tables, pick, table, waves
from tritile.choose.classes import MEASURED, class_of
from tritile.choose.formula import FORMULAS, PermuteConstants, shape_of
from tritile.choose.portfolio import (
    LAYERS,
    MOST,
    OWN,
    RACED,
    Correction,
    Loss,
    Portfolio,
    factors,
    portfolio_of,
)
from tritile.cli import findings
from tritile.core import settings
from tritile.core.config import Config
from tritile.core.device import TARGETS, Device, target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem
from tritile.errors import InvalidValueError, NotTunedError, UntunedWarning
from tritile.families import space
from tritile.families.common.cost import Constants, facts_of
from tritile.families.fp16x3.lowering import suits_fp16x3
from tritile.families.registry import digests
from tritile.families.space import illegal
from tritile.nn.exchanged import PARTS_AHEAD
from tritile.ops import request as ops_request
from tritile.tune.calibrate import fit
from tritile.tune.calibrate.draw import DRAWS, drawn
from tritile.tune.calibrate.run import _EARNED, Measured, is_candidate
from tritile.tune.calibrate.sweep import Row, useful

H200 = target_device("nvidia-h200")
product_us = FORMULAS["matmul"].us
A100 = target_device("sm_80")
PRODUCT = MatmulProblem(1, 777, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
TAKEN = {  # of whom other problems take the portfolio
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
MODELLED = {"fp16x3"}  # classes of which no portfolio ships


legal_configs = functools.cache(space.legal_configs)  # these take long
pick = functools.cache(waves.pick)


def members(count=6, problem=PRODUCT, device=H200):
    """A portfolio of legal candidates, with constants of their own."""
    legal = [each for each in legal_configs(problem, device) if is_candidate(each, "bf16_nt", device)]
    legal = [each for each in legal if not {"PAIR", "SPLIT_TAIL"}.intersection(dict(each.kwargs))]
    configs = legal[:: max(1, len(legal) // count)][:count]
    constants = [replace(Constants(), start=1.0 + place) for place in range(len(configs))]
    return Portfolio("bf16_nt", tuple(configs), tuple(constants), Loss(100, 0.01, 0.05, 0.2))


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
    assert {each.op for each in MEASURED.values()} == set(FORMULAS)
    assert drawn("fp8", 5, "a") == drawn("fp8", 5, "a") != drawn("fp8", 5, "b")


@pytest.mark.parametrize("problem", UNSERVED, ids=lambda problem: problem.label)
def test_what_no_class_serves(problem):
    assert class_of(problem) is None
    assert pick.by_portfolio(problem, H200) is None


def test_formula_of_numbers_and_tensors():
    problems = [*drawn("bf16_nn", 20, "x"), *drawn("unaligned_16bit", 20, "x")]
    for copies in (False, True):
        many = fit.facts_at(FORMULAS["matmul"], problems, H200, copies)
        for config in legal_configs(PRODUCT, H200)[::97]:
            shape = shape_of(config, PRODUCT, H200)
            at_once = product_us(shape, many, Constants())
            one_by_one = [product_us(shape, facts_of(p, H200, copies), Constants()) for p in problems]
            assert at_once.tolist() == pytest.approx(one_by_one, rel=1e-12)
            assert all(0 < us < 1e8 for us in one_by_one)


def test_portfolio_ranks_legal():
    portfolio = members(20)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8}
    split = Config.of(4, 4, "descriptor", **blocks, PERSISTENT=False, SPLIT_K=64, SUBTILES=1)
    short = replace(PRODUCT, k=128)
    first = replace(portfolio, configs=(split, *portfolio.configs), constants=(Constants(start=1e-6),) * 21)
    assert illegal(split, short, H200) is not None
    ranked = first.ranked(short, H200, 30)
    assert split not in [config for _, config in ranked]
    assert {us for us, _ in ranked} <= set(first.times(short, H200))
    own = useful(first.configs, short, H200)  # others come last
    times = [us for us, config in ranked if config in own]
    assert times == sorted(times)
    assert len(times) > 5
    assert first.ranked(short, H200, 2) == ranked[:2]


def test_configs_that_others_dominate_come_last():
    """A sweep does not time them, and their predictions may be far too low: few rows in a tall tile."""
    shipped, *_ = gpu_tables.shipped(H200)
    portfolio, few = shipped.portfolios["bf16_nn"], replace(PRODUCT, m=2, n=640, k=15488, b_layout="row")
    own = useful(portfolio.configs, few, H200)
    ranked = portfolio.ranked(few, H200, 96)
    assert {config for _, config in ranked[: len(own)]} == set(own)
    assert len(ranked) > len(own) > 0
    tall = [config for _, config in ranked[len(own) :]]
    alone = replace(
        portfolio, configs=tuple(tall), constants=portfolio.constants[: len(tall)], correction=None
    )
    assert len(alone.ranked(few, H200, 1)) == 1


def corrected():
    """The same portfolio, with a correction by inputs from 0 to 2."""
    dice, inputs, configs = random.Random(5), FORMULAS["matmul"].inputs, len(members().configs)
    one, two = LAYERS
    shapes = (configs, OWN), (one, 1 + inputs + OWN), (two, 1 + one), (configs, 1 + two)
    rows = ([[dice.uniform(-0.1, 0.2) for _ in range(wide)] for _ in range(count)] for count, wide in shapes)
    tuples = (tuple(map(tuple, each)) for each in ([[0.0] * inputs, [2.0] * inputs], *rows))
    return replace(members(), correction=Correction(*tuples))


def of_permutations():
    configs = tuple(legal_configs(PERMUTED["permute_4"], H200)[::97][:8])
    return Portfolio("permute_4", configs, (PermuteConstants(),) * len(configs), members().loss)


@pytest.mark.parametrize("made", [members, corrected, of_permutations])
def test_portfolio_from_json(made):
    portfolio = made()
    problem = PERMUTED.get(portfolio.name, PRODUCT)
    read = portfolio_of(portfolio.name, json.loads(json.dumps(portfolio.to_dict())))
    assert read.times(problem, H200) == pytest.approx(portfolio.times(problem, H200), rel=0.05)
    assert portfolio_of(portfolio.name, read.to_dict()) == read
    with pytest.raises(InvalidValueError, match=r"wanted|is not of"):
        portfolio_of("bf16_nt" if made is of_permutations else "permute_4", portfolio.to_dict())


@pytest.mark.parametrize("missed", [0.0, 0.3])
def test_corrections_earn_their_keep(missed, monkeypatch):
    monkeypatch.setattr(fit, "_BATCHES", 60)
    monkeypatch.setattr(fit, "_STEPS", 2)
    portfolio, rows = members(5), []
    for problem in drawn("bf16_nt", 60, "earned"):
        times = portfolio.times(problem, H200)
        slower = [math.exp(missed * (place % 2) * math.sin(math.log(problem.n) / 2)) for place in range(5)]
        timed = zip(portfolio.configs, times, slower, strict=True)
        rows.append(Row(problem, {config: us * by for config, us, by in timed}))
    measured = Measured("bf16_nt", rows, H200)
    left_out = measured.left_out()
    alone, corrected = (float(measured.lost(us).log1p().mean()) for us in left_out[:2])
    assert left_out.earned == bool(measured.portfolio(left_out).correction) == (missed > 0)
    assert corrected < alone - _EARNED or not missed
    assert left_out.picks is (left_out.corrected if missed else left_out.alone)
    assert not left_out._replace(corrected=left_out.alone).earned


def damaged(change):
    data = json.loads(json.dumps(members().to_dict()))
    change(data)
    return data


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, {"members": []}, {"members": [], "loss": {}},
        damaged(lambda d: d["loss"].pop("p95")),
        damaged(lambda d: d["loss"].update(sizes=0)),
        damaged(lambda d: d.update(members=d["members"] * (MOST // 6 + 1))),
        damaged(lambda d: d.update(members=d["members"][:2] * 2)),
        damaged(lambda d: d["members"][0]["constants"].pop()),
        damaged(lambda d: d["members"][0]["constants"].__setitem__(3, 0.0)),
        damaged(lambda d: d["members"][0]["constants"].__setitem__(3, "0.2")),
        damaged(lambda d: d["members"][0]["config"].update(family="none")),
        damaged(lambda d: d["members"][0]["config"]["kwargs"].pop("BLOCK_K")),
        damaged(lambda d: d["members"][0]["config"]["kwargs"].update(BLOCK_K=0)),
        damaged(lambda d: d["members"][0]["constants"].__setitem__(13, 400.0)),
        damaged(lambda d: d.update(correction=None)),
        *(
            damaged(lambda d, own=own: d.update(corrected().to_dict()) or own(d["correction"]))
            for own in (
                lambda d: d.pop("ranges"),
                lambda d: d["ranges"][1].pop(),
                lambda d: d.update(first=d["first"][1:]),
                lambda d: d["weights"][0].pop(),
                lambda d: d["weights"][0].__setitem__(1, 1e7),
                lambda d: d["weights"].__setitem__(0, 0.0),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_portfolio_is_refused(data):
    with pytest.raises(InvalidValueError):
        portfolio_of("bf16_nt", data)
    with pytest.raises(InvalidValueError):
        portfolio_of("no class", members().to_dict())


def test_a_table_keeps_its_portfolios(tmp_path):
    made = table.Table(H200.to_dict(), {}, (), {"bf16_nt": members()})
    table.write(made, tmp_path / "gpu.json")
    read = table.read(tmp_path / "gpu.json")
    assert read.portfolios["bf16_nt"].configs == members().configs
    later = table.Table(H200.to_dict(), digests(), (), {"fp8": replace(members(), name="fp8")})
    assert set(table.completed(later, replace(read, kernels=digests())).portfolios) == {"fp8", "bf16_nt"}
    assert set(table.completed(later, read).portfolios) == {"fp8"}  # the others were of other kernels
    text = json.loads((tmp_path / "gpu.json").read_text())
    text["portfolios"]["bf16_nt"]["members"][0]["constants"] = [1.0]
    (tmp_path / "gpu.json").write_text(json.dumps(text))
    with pytest.raises(InvalidValueError, match="constants"):
        table.read(tmp_path / "gpu.json")


def test_plan_says_prediction_quality():
    plan = pick.plan_for(replace(PRODUCT, m=779), H200, "cached")
    portfolio, *_ = gpu_tables.portfolio("bf16_nt", H200)
    (us, config), (second, _) = portfolio.ranked(plan.problem, H200, 2)
    assert (plan.source, plan.config, plan.us) == ("predicted", config, us)
    told = f"{second / us:.3f} times", f"{portfolio.loss.p95:.1%}", "bf16_nt", f"measured on {H200.name}"
    assert all(text in plan.why for text in told)
    assert pick.plan_for(plan.problem, H200, "off").source == "model"


def test_similar_gpu_takes_table():
    alike = replace(H200, name="NVIDIA H200 of a name of its own", memory_gbps=4400)
    plan = pick.plan_for(PRODUCT, alike, "cached")
    assert plan.source == "predicted"
    assert "measured on a similar GPU, NVIDIA H200" in plan.why
    assert gpu_tables.shipped(alike)[0] is gpu_tables.shipped(H200)[0]
    for other in (
        replace(A100, name="another A100"), replace(alike, memory_gbps=2000), replace(alike, arch=100),
    ):  # fmt: skip
        assert not gpu_tables.like(other)
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


@pytest.fixture
def ship(folder, tmp_path, monkeypatch):
    """Ships a table in place of all that do."""

    def shipped(made):
        table.write(made, folder / f"{Device.from_dict(made.device).slug}.json")
        forget_tables()

    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(waves, "pick", pick)
    return shipped


def of_first(device):
    """A table of a portfolio of the first legal configs of a GPU."""
    own = members(20, device=device)
    return table.Table(device.to_dict(), digests(), (), {"bf16_nt": own})


def test_class_without_portfolio_modelled(ship):
    plan = pick.plan_for(PRODUCT, A100, "cached")
    assert (plan.source, plan.config) == ("model", pick(PRODUCT, A100))
    with pytest.raises(NotTunedError, match="no measurement covers"):
        pick.plan_for(PRODUCT, A100, "strict")
    assert pick.plan_for(PRODUCT, A100, "tune") is None  # it is to be measured
    assert pick.likely(PRODUCT, A100, RACED) == []
    assert not gpu_tables.is_calibrated(A100)
    found = findings._portfolios(A100)
    assert found.found.startswith("none: bf16_nn, ")
    assert "--calibrate all" in found.advice
    ship(of_first(A100))
    assert pick.plan_for(PRODUCT, A100, "strict").source == "predicted"
    assert gpu_tables.is_calibrated(A100)
    found = findings._portfolios(A100)
    assert f"measured on {A100.name}: bf16_nt" in found.found
    assert not found.advice


@pytest.mark.parametrize("name", MEASURED)
def test_target_has_legal_pick(name):
    problem = drawn(name, 1, "any")[0]
    served = {gpu for gpu, device in TARGETS.items() if gpu_tables.portfolio(name, device) is not None}
    hopper = {gpu for gpu, device in TARGETS.items() if device.nvidia == 90}
    assert served == (set() if name in MODELLED else hopper)
    for device in map(TARGETS.__getitem__, served):
        portfolio, *_ = gpu_tables.portfolio(name, device)
        (_, config), *_ = portfolio.ranked(problem, device, 1)
        assert illegal(config, problem, device) is None
        plan = pick.plan_for(problem, device, "cached")
        if plan.config.family not in portfolio.families | {"aten"}:
            assert "the portfolio's pick is predicted to take" in plan.why
        else:
            assert plan.config in portfolio.configs or plan.source == "table"


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
    ship(of_first(H200))
    assert told(1, PRODUCT, UNSERVED[2]) == ({"predicted", "model"}, [])  # some classes were measured


def test_untimed_config_not_fast(monkeypatch):
    monkeypatch.setattr(fit, "_BATCHES", 300)
    at = torch.linspace(-1, 1, 200, dtype=torch.float64)
    predicted = torch.full((200, 2), 100.0, dtype=torch.float64)
    fast = torch.where(at < 0, 60.0, math.nan)  # of the second config, which was not timed elsewhere
    us = torch.stack([predicted[:, 0], fast], 1)
    found = fit.correction(at[:, None, None].expand(200, 2, 1), predicted, us, torch.arange(200))
    inputs = torch.tensor([-0.7, 0.7])[:, None, None].expand(2, 2, 1).numpy()
    there, elsewhere = factors(inputs, *found.arrays())
    assert there[1] < 0.8 < there[0]
    assert elsewhere[1] > elsewhere[0]


def test_constants_are_found_again():
    """What is fitted to times made by known constants predicts times at other sizes, and orders them."""
    dice = random.Random(3)
    problems = drawn("bf16_nt", 400, "fit")
    configs = [c for c in legal_configs(PRODUCT, H200) if c.family == "warpgroups"]
    grouped = [tuple((k, 8 if k == "GROUP_M" else v) for k, v in c.kwargs) for c in configs]
    configs = [replace(c, kwargs=kwargs) for c, kwargs in zip(configs, grouped, strict=True)]
    configs = list(dict.fromkeys(configs))[::60][:12]
    shapes = [shape_of(config, PRODUCT, H200) for config in configs]
    facts = fit.facts_at(FORMULAS["matmul"], problems, H200, True)

    def true(shape):
        work = 2 * shape.block_m * shape.block_n * shape.block_k / dice.uniform(4e6, 6e6)
        changes = {"work": work, "turn": dice.uniform(0.15, 0.4), "fill": dice.uniform(1, 3)}
        return replace(Constants(), **changes, odd_a=dice.uniform(0.2, 1.2), memory=dice.uniform(3e6, 4.5e6))

    noise = torch.Generator().manual_seed(1)
    exact = torch.stack([product_us(shape, facts, true(shape)) for shape in shapes], 1)
    us = exact * (1 + 0.02 * torch.randn(exact.shape, generator=noise, dtype=torch.float64))
    rows, rest = torch.arange(200), torch.arange(200, 400)
    found = fit.fitted(FORMULAS["matmul"], shapes, ["alike"] * len(shapes), [facts] * len(shapes), us, rows)
    predicted = torch.stack([product_us(s, facts, c) for s, c in zip(shapes, found, strict=True)], 1)
    errors = (predicted / exact).log()[rest].abs()
    assert float(errors.median()) < 0.01
    assert float(errors.quantile(0.95)) < 0.05
    picks = predicted[rest].argmin(1, keepdim=True)
    lost = exact[rest].gather(1, picks)[:, 0] / exact[rest].amin(1) - 1
    loss = fit.loss_of(lost)
    assert loss.sizes == 200
    assert loss.median < 0.005
    assert loss.p95 < 0.03


# --- The committed sweeps


def test_shipped_is_of_sweeps(monkeypatch):
    folder = portfolios.Path(portfolios.__file__).parent / "sweeps"
    paths = [*sorted(folder.glob("*.jsonl.gz")), *sorted(folder.glob("more/*.jsonl.gz"))]
    with monkeypatch.context() as patch:  # whether each config is legal takes all the time
        patch.setattr(portfolios, "illegal", lambda *given: None)
        files = {path: portfolios.read(path, 0.0) for path in paths if not path.name.startswith("fp16x3")}
        path = folder / "bf16_nt.jsonl.gz"  # times below those asked for are left out
        long = [row for row in files[path][1] if min(row.times.values()) >= 6]
        assert 0 < len(long) < len(files[path][1])
        assert portfolios.read(path, 6.0)[1] == long
    files |= {path: portfolios.read(path, 0.0) for path in paths if path not in files}

    monkeypatch.setattr(portfolios, "read", lambda path, least: files[path])
    swept = portfolios.read_all(paths, 0.0)
    shipped = gpu_tables.shipped(H200)[0].portfolios
    assert set(shipped) <= set(swept)
    for name, portfolio in shipped.items():
        device, rows = swept[name]
        assert device.name == "NVIDIA H200"
        assert len(rows) >= portfolios.ENOUGH
        assert set(portfolio.configs) <= {config for row in rows for config in row.times}
        assert len(rows) - 70 < portfolio.loss.sizes <= len(rows)  # but those at which few were timed

    first, more = (
        {row.problem: row.times for row in files[folder / each / "inner_dim_kept.jsonl.gz"][1]}
        for each in ("", "more")
    )
    both = {row.problem: row.times for row in swept["inner_dim_kept"][1]}
    assert both == {problem: first.get(problem, {}) | more.get(problem, {}) for problem in first | more}

    parts = [row for row in swept["fp16x3"][1] if suits_fp16x3(row.problem.m, row.problem.n, row.problem.k)]
    assert len(parts) >= 5  # where fp16 parts are the default, torch took twice as long
    assert all(row.torch_us > PARTS_AHEAD * min(row.times.values()) for row in parts)


def test_no_faster_plan_next():
    """One that is dominated may be predicted to be faster: at the least sizes one is."""
    whys = [
        pick.by_portfolio(MatmulProblem(1, m, n, k, "int8", "int8"), target_device("nvidia-h200")).why
        for m, n, k in itertools.product((1, 14, 58, 4096), repeat=3)
    ]
    found = [float(ratio) for why in whys for ratio in re.findall(r"predicted to take ([\d.]+) times", why)]
    assert 0 < len(found) < len(whys)
    assert min(found) >= 1.0
