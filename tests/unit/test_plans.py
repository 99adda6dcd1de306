"""Which source a plan's config comes from, by mode and by what there is; no GPU is asked."""

import functools
from dataclasses import replace

import pytest
import torch

import tritile
from tests.predictors import made
from tests.unit.conftest import forget_tables
from tritile.choose import gpu_tables, pick, predictor, waves
from tritile.choose.table import Entry, Table, write
from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import KernelProblem, MatmulProblem
from tritile.errors import DeviceError, InvalidValueError, NotTunedError, ShapeError
from tritile.families.registry import FAMILIES, digests
from tritile.families.space import legal_configs
from tritile.tune.subject.problem import is_tuned, task_of
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of

H200, A100 = target_device("nvidia-h200"), target_device("sm_80")
PRODUCT = MatmulProblem(1, 777, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
TURNED = PermuteProblem.transposed(1, 1024, 1024, 8)  # of few configs
OLD = dict.fromkeys(digests(), "0" * 16)
modelled = functools.cache(waves.pick)  # to rank a space of products takes long


def tile(m=64, n=64, k=32, group=8, family="tile", **rest):
    return Config.of(family=family, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, **rest)


PINNED, MEASURED, SLOWER, TABLED, PICK = (tile(group=group) for group in (1, 2, 4, 8, 16))
ILLEGAL = [
    tile(m=8), tile(m=512, n=512), tile(family="other"), tile(k=128, num_stages=8), Config.of(BLOCK_M=1)
]  # fmt: skip
OWN = made("bf16_nt", [PICK], H200)
CONFIGS = {"pinned": PINNED, "exact": MEASURED, "table": TABLED, "predicted": PICK}


def remember(config, us, problem=PRODUCT, **rest):
    family = FAMILIES[problem.op].get(config.family, FAMILIES[problem.op]["tile"])
    store_of(H200).add(family.digest, Trial(problem, config, us, **rest))


@pytest.fixture
def there(folder, tmp_path, monkeypatch):
    """Puts what its words name where plans look for it."""
    monkeypatch.setattr(waves, "pick", modelled)
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path / "cache"))

    def put(words):
        shipped = Table(H200.to_dict(), OLD if "old shipped" in words else digests(), ())
        if "table" in words:
            shipped = replace(shipped, entries=(Entry(PRODUCT, TABLED, 11.0),))
        if "predictor" in words:
            of = replace(OWN, kernels=OLD) if "old predictor" in words else OWN
            predictor.write(of, folder / "products.predictor.json")
        if "measured" in words:  # slower than the table says, yet here
            remember(SLOWER, 30.0)
            remember(MEASURED, 20.0)
        if "elsewhere" in words:  # other sizes, another source of the kernel, and what failed
            remember(MEASURED, 1.0, replace(PRODUCT, m=1536))
            store_of(H200).add("0" * 16, Trial(PRODUCT, SLOWER, 2.0))
            remember(PINNED, None, failure="did not compile")
            remember(TABLED, 1.0, failure="wrong answer")
        if "illegal" in words:
            for config in ILLEGAL:
                remember(config, 0.001)
            shipped = replace(shipped, entries=(Entry(PRODUCT, ILLEGAL[0], 0.001),))
        write(shipped, folder / "nvidia-h200.json")
        if "pin" in words:
            device = A100 if "another GPU" in words else H200
            pinned = Table(device.to_dict(), OLD if "old pin" in words else digests(), ())
            pinned = replace(pinned, entries=(Entry(PRODUCT, PINNED, 9.0),))
            write(pinned, tmp_path / "pinned.json")
            monkeypatch.setenv("TRITILE_TABLE", str(tmp_path / "pinned.json"))
        forget_tables()

    return put


CASES = {  # by mode: cached, strict, tune, off
    "nothing": ("model", NotTunedError, None, "model"),
    "elsewhere": ("model", NotTunedError, None, "model"),
    "illegal": ("model", NotTunedError, None, "model"),
    "illegal, measured": ("exact", "exact", "exact", "model"),
    "table": ("table", "table", None, "model"),
    "old shipped table": ("table", NotTunedError, None, "model"),
    "predictor": ("predicted", "predicted", None, "model"),
    "old predictor": ("predicted", NotTunedError, None, "model"),
    "table, predictor": ("table", "table", None, "model"),
    "measured, table, predictor": ("exact", "exact", "exact", "model"),
    "pin, measured, table": ("pinned", "pinned", "pinned", "model"),
    "old pin, measured": ("pinned", "exact", "pinned", "model"),
    "pin of another GPU, measured": ("exact", "exact", "exact", "model"),
}


@pytest.mark.parametrize("words", CASES)
def test_plan_of_first_source(there, words):
    there(words)
    for mode, source in zip(("cached", "strict", "tune", "off"), CASES[words], strict=True):
        if source is NotTunedError:
            with pytest.raises(NotTunedError, match=f"{PRODUCT.label} on NVIDIA H200"):
                pick.plan_for(PRODUCT, H200, mode)
            continue
        plan = pick.plan_for(PRODUCT, H200, mode)
        assert (plan and plan.source) == source, mode
        if plan is not None:
            config = CONFIGS.get(source) or modelled(PRODUCT, H200)
            assert plan.config == config
            assert ("pinned" in plan.why) == (source == "pinned")
            assert plan.current == ("old" not in words or source in ("exact", "model"))


def test_pin_says_what_it_hides(there, monkeypatch, tmp_path):
    there("pin, measured")
    plan = pick.plan_for(PRODUCT, H200, "cached")
    assert plan.why.endswith(f"; not used is {MEASURED}, 20.0 us measured on {H200.name}")
    remember(PINNED, 15.0)
    pick.forget()
    assert "not used" not in pick.plan_for(PRODUCT, H200, "cached").why  # it is what runs
    path = tmp_path / "pinned.json"
    path.write_text(path.read_text().replace('"us": 9.0', '"us": null'))
    forget_tables()
    remember(MEASURED, 12.0)
    pick.forget()
    plan = pick.plan_for(PRODUCT, H200, "cached")
    assert (plan.config, plan.source) == (MEASURED, "exact")


def test_pinned_predictions_refused(there, tmp_path):
    there("pin")
    path = tmp_path / "pinned.json"
    path.write_text(path.read_text().replace("{", '{"measured": false, ', 1))
    forget_tables()
    with pytest.raises(InvalidValueError, match=r"TRITILE_TABLE: .*pinned\.json holds predictions"):
        pick.plan_for(PRODUCT, H200, "cached")


def test_missing_pinned_file_is_error(there, monkeypatch):
    there("measured")
    monkeypatch.setenv("TRITILE_TABLE", "/no/such/file")
    with pytest.raises(InvalidValueError, match="/no/such/file"):
        pick.plan_for(PRODUCT, H200, "cached")


def test_calibration_before_shipped(there):
    there("nothing")
    path = gpu_tables.calibrated_path(H200, "products")
    path.parent.mkdir(exist_ok=True)
    predictor.write(OWN, path)
    plan = pick.plan_for(PRODUCT, H200, "cached")
    assert (plan.source, plan.config) == ("predicted", PICK)
    assert "measured here" in plan.why
    path.write_text("nothing")
    tritile.forget()
    with pytest.warns(tritile.errors.StoreWarning, match="a predictor is not used"):
        assert pick.plan_for(PRODUCT, H200, "cached").source == "model"


def test_a_plan_is_remembered_until_forgotten(there):
    there("nothing")
    first = pick.plan_for(PRODUCT, H200)
    remember(MEASURED, 20.0)
    assert pick.plan_for(PRODUCT, H200) is first
    tritile.forget()
    found = pick.plan_for(PRODUCT, H200)
    assert (found.source, found.config, found.us) == ("exact", MEASURED, 20.0)


def test_checked_answer_is_incumbent(there):
    """Quick looks of every family are not enough."""
    there("nothing")
    first, second = legal_configs(TURNED, H200, "tile")[:2]
    for config in (first, *(legal_configs(TURNED, H200, name)[0] for name in waves.families(TURNED, H200))):
        remember(config, 10.0, TURNED)
    assert not is_tuned(TURNED, H200)
    assert task_of(TURNED, H200).incumbent is None
    remember(second, 20.0, TURNED, error=1e-4)
    assert is_tuned(TURNED, H200)
    assert task_of(TURNED, H200).incumbent == second


# --- tritile.plan ---


def test_plan_of_host_tensors():
    a, b = torch.zeros(3, 100, 70).half(), torch.zeros(70, 33).half()
    found = tritile.plan(tritile.matmul, a, b)
    assert found.source == "host"
    assert (found.problem.batch, found.problem.m, found.problem.n, found.problem.k) == (1, 300, 33, 70)
    turned = tritile.plan(tritile.transpose, torch.zeros(5, 7, 9), 0, 2)
    assert (turned.source, turned.problem.itemsize) == ("host", 4)


def test_plan_for_absent_gpu(there):
    there("nothing")
    x = torch.zeros(1024, 1024, dtype=torch.float64)
    for found in (tritile.plan(TURNED, device=H200), tritile.plan(tritile.transpose, x, 0, 1, device=H200)):
        assert (found.problem, found.source, found.device.name) == (TURNED, "model", "NVIDIA H200")
    with tritile.mode("tune"):  # nothing is measured by asking
        assert tritile.plan(TURNED, device=A100).source == "model"
    with tritile.mode("strict"), pytest.raises(NotTunedError):
        tritile.plan(TURNED, device=A100)


KERNEL = KernelProblem("softmax", (("N", 3),), (("x", "float32"),))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (torch.matmul, ("tritile.matmul", "permute", "transpose", "problem")),
        ("glue", ("'glue'", "tritile.matmul", "its name")),
        (None, ("None", "tritile.matmul")),
        ([tritile.matmul], ("matmul", "tritile.matmul")),
        (KERNEL, ("softmax", "tritile.matmul")),
        (torch.zeros(3, 3), ("tensor", "tritile.matmul")),
    ],
)
def test_plan_of_something_else(what, words):
    with pytest.raises(InvalidValueError) as caught:
        tritile.plan(what, device=H200)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((tritile.matmul, torch.zeros(3, 4), torch.zeros(5, 6)), ShapeError),
        ((tritile.matmul, torch.zeros(3, 0), torch.zeros(0, 6)), ShapeError),
        ((tritile.linear, torch.zeros(0, 4), torch.zeros(6, 4)), ShapeError),
        ((tritile.linear, torch.zeros(3, 4), torch.zeros(6, 4), torch.zeros(5)), ShapeError),
        ((tritile.transpose, torch.zeros(0, 4)), ShapeError),
        ((tritile.transpose, torch.zeros(3, 4), 5, 0), ShapeError),
        ((tritile.matmul, torch.zeros(3, 4, device="meta"), torch.zeros(4, 6)), DeviceError),
    ],
)
def test_plan_raises_what_the_call_would(args, error):
    with pytest.raises(error):
        tritile.plan(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_plan_without_a_gpu():
    with pytest.raises(InvalidValueError, match="pass device="):
        tritile.plan(PRODUCT)


def test_impossible_problem_says_so():
    fp8 = replace(PRODUCT, dtype="float8_e4m3fn")
    with pytest.raises(tritile.errors.UnsupportedError, match=r"float8_e4m3fn.*8\.9"):
        tritile.plan(fp8, device=A100)
    small = replace(TARGETS["sm_80"], shared_memory=512)
    with pytest.raises(tritile.errors.UnsupportedError, match="shared memory"):
        tritile.plan(replace(PRODUCT, dtype="float64", out_dtype="float64"), device=small)


@pytest.mark.parametrize(
    ("m", "n", "wanted"),
    [(1, 2048, 16), (64, 1056, 16), (8, 4096, 32), (8, 1040, None), (8, 8192, None), (65, 2048, None)],
)
def test_invariant_products_of_few_rows(m, n, wanted):
    """Narrow tiles that all run at once and fill half of the SMs, on Hopper."""
    problem = replace(PRODUCT, m=m, n=n, invariant=True)
    chosen = pick.plan_for(problem, H200, "cached").config
    assert ((chosen["BLOCK_N"], chosen["BLOCK_K"]) == (wanted, 256)) == (wanted is not None)
    assert pick.of_few_rows(problem, A100) is None
    assert pick.of_few_rows(replace(problem, invariant=False), H200) is None
    assert pick.of_few_rows(replace(problem, a_align=2), H200) is None
