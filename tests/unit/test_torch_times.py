"""Whether tritile is faster than torch at a problem: by what was measured, and by leads of classes."""

import json
import math
from dataclasses import replace

import pytest
import torch

import tritile
from tests.configs import tile
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError, StoreWarning
from tritile.families.registry import FAMILIES, digests
from tritile.planning import gpu_tables, plans, table, torch_times
from tritile.planning.portfolio import Lead, lead_of, terms
from tritile.planning.store import Trial, store_of
from tritile.planning.table import Entry, Table
from tritile.planning.trial import AS_TORCH, TORCH
from tritile.tune.calibrate import fit
from tritile.tune.calibrate.draw import drawn

H200, A100 = TARGETS["nvidia-h200"], TARGETS["sm_80"]
HALF = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16")
BIASED = replace(HALF, epilogue="bias=row")
TURN = PermuteProblem.turned(1, 4096, 4096, 4)
CONFIG = tile(128, 128, 64, 8, 3)


@pytest.fixture(autouse=True)
def _fresh():
    tritile.forget()
    yield
    tritile.forget()


def lead(problem, ratio, least):
    """A lead that predicts this ratio, whatever the sizes."""
    return Lead((math.log(ratio), *[0.0] * (len(terms(problem)) - 1)), least, 100)


def ship(monkeypatch, *entries, **leads):
    named = {name.replace("_", "-"): each for name, each in leads.items()}
    made = Table(H200.to_dict(), digests(), entries, leads=named)
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: (made,) if device == H200 else ())


def compared(problem, source="table", us=50.0, device=H200):
    plan = plans.Plan(problem, CONFIG, source, device, us)
    return torch_times.compared(problem, device, lambda: plan)


def unplanned(problem, device=H200):
    return torch_times.compared(problem, device, lambda: pytest.fail("planned"))


@pytest.mark.parametrize(
    ("us", "torch_us", "source", "found"),
    [
        (100, 110, "table", (1.1, True, "measured", 110)),
        (100, 110, "predicted", (1.1, True, "measured", 110)),
        (100, 110, "model", (None, False, "", None)),  # of another config than the one that was measured
        (100, 101, "table", (1.01, False, "measured", 101)),
        (100, 90, "exact", (0.9, False, "measured", 90)),
        (100, None, "table", (None, False, "", None)),
    ],
)
def test_what_was_measured_is_compared_by_that(us, torch_us, source, found, monkeypatch):
    ship(monkeypatch, Entry(HALF, CONFIG, us, torch_us))
    for problem in (HALF, BIASED):
        assert compared(problem, source) == found


def test_a_bias_that_was_measured_counts_before_the_bare_product(monkeypatch):
    ship(monkeypatch, Entry(HALF, CONFIG, 100, 110), Entry(BIASED, CONFIG, 100, 90))
    assert compared(HALF).wins
    assert not compared(BIASED).wins


def test_what_was_measured_here_goes_before_what_ships(monkeypatch):
    ship(monkeypatch, Entry(HALF, CONFIG, 100, 90))
    store = store_of(H200)
    store.add(TORCH, Trial(HALF, AS_TORCH, 30.0))
    assert torch_times.measured(HALF, H200) == (100, 90)  # of tritile nothing is known here
    store.add(FAMILIES["matmul"][CONFIG.family].digest, Trial(HALF, CONFIG, 20.0, error=0.0))
    assert torch_times.measured(HALF, H200) == (20, 30)
    assert compared(HALF, "exact").wins
    assert plans.plan_for(HALF, H200).config == CONFIG  # torch's time is no config of ours


def test_what_another_torch_took_does_not_count(monkeypatch):
    ship(monkeypatch)
    store = store_of(H200)
    store.add("torch 1.0", Trial(HALF, AS_TORCH, 30.0))
    store.add(FAMILIES["matmul"][CONFIG.family].digest, Trial(HALF, CONFIG, 20.0, error=0.0))
    assert torch_times.measured(HALF, H200) is None


UNLIKE = [
    {"batch": 2},
    {"a_layout": "column"},
    {"out_layout": "column"},
    {"b_layout": "strided"},
    {"invariant": True},
    {"m": 1, "n": 64, "k": 64},
    {"m": 16384, "n": 16, "k": 4096},
]
LARGER = [{"m": 16384, "n": 32768, "k": 32768}, {"n": 65536, "m": 64}, {"m": 100_000, "n": 64, "k": 64}]


@pytest.mark.parametrize("change", UNLIKE, ids=str)
def test_a_lead_says_nothing_of_what_is_unlike_all_that_it_was_measured_for(change, monkeypatch):
    leads = {name: lead(HALF, 9.0, 1.0) for name in ("halves_nn", "halves_nt", "halves_odd")}
    ship(monkeypatch, **leads)
    assert compared(HALF, "predicted").wins
    assert not unplanned(replace(HALF, **change)).wins


@pytest.mark.parametrize("change", LARGER, ids=str)
def test_a_product_larger_than_those_that_were_measured_counts_as_the_largest_of_them(change, monkeypatch):
    seen = []
    monkeypatch.setattr(Lead, "ratio", lambda self, problem: seen.append(problem) or 9.0)
    ship(monkeypatch, halves_nn=lead(HALF, 9.0, 1.0))
    assert compared(replace(HALF, **change), "predicted").wins
    wanted = replace(HALF, **change)
    n, k = (min(side, 32768) for side in (wanted.n, wanted.k))
    assert all(given.m <= 16384 and 2 * given.m * n * k <= 2e12 for given in seen)
    assert all((given.n, given.k) == (wanted.n, wanted.k) for given in seen)  # which tell what rows start on


@pytest.mark.parametrize(("m", "n"), [(500, 400), (40_000, 10_000)])
def test_nor_of_tensors_smaller_or_larger_than_those_that_were_permuted(m, n, monkeypatch):
    ship(monkeypatch, turned_4=lead(TURN, 9.0, 1.0))
    assert compared(TURN, "predicted").wins
    assert not unplanned(PermuteProblem.turned(1, m, n, 4)).wins


def test_more_is_asked_of_a_lead_where_the_model_picks(monkeypatch):
    ship(monkeypatch, halves_nn=lead(HALF, 1.3, 1.2))
    assert compared(HALF, "predicted").wins
    assert not compared(HALF, "model").wins
    ship(monkeypatch, halves_nn=lead(HALF, 1.6, 1.2))
    assert compared(HALF, "model").wins


def test_times_of_another_gpu_or_of_other_kernels_do_not_count_and_of_leads_more_is_asked(monkeypatch):
    made = Table(H200.to_dict(), digests(), (Entry(HALF, CONFIG, 10.0, 20.0),))
    led = replace(made, leads={"halves-nn": lead(HALF, 1.5, 1.25)})
    like = replace(H200, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: (led,))
    assert torch_times.measured(HALF, H200) == (10, 20)
    assert torch_times.measured(HALF, like) is None
    assert compared(HALF, "predicted").wins
    assert not compared(HALF, "predicted", device=like).wins
    surer = replace(led, leads={"halves-nn": lead(HALF, 1.6, 1.25)})
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: (surer,))
    assert compared(HALF, "predicted", device=like).wins
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: (replace(led, entries=(), kernels={}),))
    assert not unplanned(HALF).wins


@pytest.mark.parametrize(
    ("ratio", "least", "wins"), [(1.3, 1.2, True), (1.01, 1.0, False), (1.3, 1.4, False), (1.3, 1e9, False)]
)
def test_what_was_not_is_compared_by_the_lead_of_its_class(ratio, least, wins, monkeypatch):
    ship(monkeypatch, halves_nn=lead(HALF, ratio, least), turned_4=lead(TURN, ratio, least))
    for problem in (HALF, BIASED, TURN):
        found = compared(problem, "predicted")
        assert found.ratio == pytest.approx(ratio)
        assert (found.wins, found.source) == (wins, "predicted")
        assert found.torch_us == pytest.approx(50 * ratio)


def test_what_was_never_measured_is_left_unplanned(monkeypatch):
    ship(monkeypatch, halves_nn=lead(HALF, 9.0, 1.0))
    full = replace(HALF, dtype="float32", out_dtype="float32")
    for problem, device in ((HALF, A100), (full, H200), (replace(HALF, b_layout="column"), H200)):
        assert unplanned(problem, device) == torch_times.UNKNOWN


def test_what_ships_is_compared_as_it_was_measured():
    """What wins of it was ahead, and what was ahead wins."""
    known = [entry for entry in gpu_tables.shipped(H200)[0].entries if entry.torch_us]
    assert len(known) > 300
    for entry in known:
        assert compared(entry.problem).wins == (entry.torch_us / entry.us >= torch_times.NOISE), entry


def test_a_lead_is_fitted_to_ratios_and_knows_where_it_can_tell():
    """Of ratios that follow sizes exactly all wins are taken; of those that follow nothing, few or none."""
    problems = drawn("halves-nn", 200, "leads")
    x = torch.tensor([terms(problem) for problem in problems], dtype=torch.float64)
    weights = torch.linspace(-0.5, 0.5, x.shape[1], dtype=torch.float64)
    exact = x @ weights
    exact -= exact.median()  # half are won
    found = fit.lead(problems, exact)
    taken = [found.ratio(problem) >= found.least for problem in problems]
    won = exact > 0
    assert sum(won.tolist()) > 20
    wrong = sum(t != w for t, w in zip(taken, won.tolist(), strict=True))
    assert wrong <= 0.05 * len(problems)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = fit.lead(problems, noise)
    assert sum(told.ratio(problem) >= told.least for problem in problems) < 20
    behind = fit.lead(problems, -noise.abs())
    assert not any(behind.ratio(problem) >= behind.least for problem in problems)


def test_leads_of_another_version_are_skipped_and_the_rest_of_the_table_is_read(tmp_path):
    made = Table(H200.to_dict(), digests(), (), leads={"turned-4": lead(TURN, 1.5, 1.25)})
    table.write(made, tmp_path / "table.json")
    data = json.loads((tmp_path / "table.json").read_text())
    data["leads"]["fp8"] = {"weights": [0.0] * 28, "least": 1.0, "sizes": 100}
    (tmp_path / "table.json").write_text(json.dumps(data))
    with pytest.warns(StoreWarning, match="1 leads are not used: .*wanted 36 weights"):
        found = table.read(tmp_path / "table.json")
    assert list(found.leads) == ["turned-4"]


def test_sizes_at_which_torch_was_not_timed_do_not_count():
    problems = drawn("turned-4", 80, "leads")
    ratios = torch.full((80,), math.log(3.0), dtype=torch.float64)
    ratios[::2] = torch.nan
    found = fit.lead(problems, ratios)
    assert found.sizes == 40
    assert found.ratio(problems[0]) == pytest.approx(3.0, rel=0.02)


def test_a_lead_is_read_as_it_was_written():
    made = lead(TURN, 1.5, 1.25)
    assert lead_of("turned-4", made.to_dict()).least == 1.25
    assert lead_of("turned-4", made.to_dict()).ratio(TURN) == pytest.approx(1.5, rel=1e-3)
    good = made.to_dict()
    for name, bad in (
        ("weights", {**good}),
        ("halves-nn", good),  # of permutations
        ("turned-4", {**good, "least": 0.5}),
        ("turned-4", {**good, "least": None}),
        ("turned-4", {**good, "sizes": 0}),
        ("turned-4", {**good, "weights": [*good["weights"][1:], "x"]}),
        ("turned-4", {"weights": good["weights"]}),
        ("turned-4", [1]),
    ):
        with pytest.raises(InvalidValueError, match=r"lead|wanted"):
            lead_of(name, bad)


def test_tables_keep_torchs_times(tmp_path):
    store = store_of(H200)
    store.add(FAMILIES["matmul"][CONFIG.family].digest, Trial(HALF, CONFIG, 20.0, error=0.0))
    store.add(TORCH, Trial(HALF, AS_TORCH, 30.0))
    made = table.from_store(store, H200, digests())
    table.write(replace(made, leads={"turned-4": lead(TURN, 1.5, 1.25)}), tmp_path / "table.json")
    found = table.read(tmp_path / "table.json")
    assert [(entry.us, entry.torch_us) for entry in found.entries] == [(20.0, 30.0)]
    assert found.leads["turned-4"].least == 1.25
