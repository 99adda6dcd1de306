"""Which configs are legal, which the model likes, and by which ladder a call gets one; no GPU is asked."""

import functools
from dataclasses import replace

import pytest
import torch

import tritile
from tritile.core.config import Config
from tritile.core.device import TARGETS, Device, target_device
from tritile.core.problem import KernelProblem, MatmulProblem, PermuteProblem
from tritile.errors import (
    DeviceError,
    InvalidValueError,
    NotTunedError,
    ShapeError,
    TritileError,
    UnsupportedError,
)
from tritile.families.common.blocks import late_fault
from tritile.families.common.rates import peak_tflops, rate
from tritile.families.matmul_tile.family import shared_bytes
from tritile.families.registry import FAMILIES, digests
from tritile.families.space import illegal, legal_configs
from tritile.planning import gpu_tables, model, plans
from tritile.planning.store import store_of
from tritile.planning.table import Entry, Table
from tritile.planning.trial import Trial
from tritile.tune.subject import is_tuned
from tritile.tune.subject.problem import task_of

SMALL = Device("Small GPU", "cuda", 80, 4, 1 << 20, 49152, 1.0, 100.0)
HOPPER = TARGETS["nvidia-h200"]
SQUARE = MatmulProblem(1, 1024, 1024, 1024, "float16", "float16")
TURN = PermuteProblem.turned(1, 1024, 1024, 2)


def tile(m=64, n=64, k=32, warps=4, stages=3, group=8, **changes):
    config = Config.of(
        family="tile", BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages
    )
    return replace(config, **changes)


def turned(m=64, n=64, warps=4, group=1, **changes):
    config = Config.of(family="tile", BLOCK_M=m, BLOCK_N=n, GROUP_M=group, num_warps=warps, num_stages=1)
    return replace(config, **changes)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No plan remembered from another test, and no table shipped."""
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: ())
    tritile.forget()
    yield
    tritile.forget()


FP8 = replace(SQUARE, dtype="float8_e4m3fn", out_dtype="bfloat16")
FP64 = replace(SQUARE, dtype="float64", out_dtype="float64")
FP32 = replace(SQUARE, dtype="float32", out_dtype="float32")
REASONS = [
    ("family", tile(family="stream"), SQUARE, HOPPER, "family 'stream'"),
    ("no family", tile(family=""), SQUARE, HOPPER, "family ''"),
    ("parameter missing", Config.of(family="tile", BLOCK_M=64), SQUARE, HOPPER, "parameters"),
    ("of another op", turned(), SQUARE, HOPPER, "parameters"),
    ("not a power of two", tile(m=48), SQUARE, HOPPER, "BLOCK_M = 48 is not a power of two"),
    ("true", tile(group=True), SQUARE, HOPPER, "GROUP_M = True"),
    ("float", tile(m=64.0), SQUARE, HOPPER, "BLOCK_M = 64.0"),
    ("too large", tile(m=1024), SQUARE, HOPPER, "BLOCK_M = 1024 is above 256"),
    ("clusters", tile(num_ctas=2), SQUARE, HOPPER, "num_ctas"),
    ("warps", tile(warps=32), SQUARE, HOPPER, "num_warps"),
    ("stages", tile(stages=9), SQUARE, HOPPER, "num_stages"),
    ("small m", tile(m=8), SQUARE, HOPPER, "BLOCK_M = 8 is below the 16"),
    ("small k of fp8", tile(k=16), FP8, HOPPER, "BLOCK_K = 16 is below the 32"),
    ("registers", tile(m=256, n=256, warps=4), SQUARE, HOPPER, "512 accumulator registers a thread, of 128"),
    ("registers of fp64", tile(m=128, n=64, warps=4), FP64, HOPPER, "128 accumulator registers"),
    ("fp8 before Ada", tile(), FP8, TARGETS["sm_80"], "8.9, not 8.0"),
    ("shared", tile(k=128, stages=8), SQUARE, HOPPER, "262144 bytes of shared memory, of 232448"),
    ("shared of a small GPU", tile(m=128, n=128, k=64), SQUARE, SMALL, "bytes of shared memory, of 49152"),
    ("idle threads", turned(m=4, n=16), TURN, HOPPER, "a tile leaves some of 128 threads idle"),
    ("too much for threads", turned(m=512, n=128), TURN, HOPPER, "256 registers a thread for its part"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "problem", "device", "reason"), [row[1:] for row in REASONS], ids=[row[0] for row in REASONS]
)
def test_why_a_config_is_illegal(config, problem, device, reason):
    assert reason in (illegal(config, problem, device) or "legal")


@pytest.mark.parametrize(
    ("config", "problem", "device"),
    [
        (tile(), SQUARE, HOPPER),
        (tile(m=16, n=16, k=16), SQUARE, SMALL),
        (tile(m=256, n=128, warps=8), SQUARE, HOPPER),
        (tile(k=32), FP8, HOPPER),
        (tile(k=32), FP8, TARGETS["gfx942"]),
        (tile(m=64, n=128), FP32, HOPPER),
        (tile(m=128, n=128), replace(FP32, precision="tf32"), HOPPER),
        (turned(), TURN, SMALL),
        (turned(m=1, n=512), TURN, HOPPER),
    ],
)
def test_legal_configs_pass(config, problem, device):
    assert illegal(config, problem, device) is None


@pytest.mark.parametrize(("k", "spills"), [(8191, True), (8192, False)])
def test_rows_that_end_amid_a_word_are_loaded_by_elements(k, spills):
    """A single row starts on 16 bytes whatever its length. Compiled, these loads spill 17 kB a thread."""
    dot = MatmulProblem(1, 1, 1, k, "int8", "int32", b_layout="column")
    assert bool(illegal(tile(m=16, n=64, k=256, warps=2), dot, HOPPER)) == spills


def test_shared_memory_is_counted_by_stages_in_flight():
    assert shared_bytes(tile(stages=3), SQUARE, HOPPER) == 3 * 128 * 32 * 2
    assert shared_bytes(tile(stages=3), SQUARE, SMALL) == 2 * 128 * 32 * 2
    assert shared_bytes(tile(stages=1), SQUARE, SMALL) == 128 * 32 * 2


SIZES = [
    (1, 1, 1, 1), (1, 1, 8192, 3), (7, 997, 1, 1009), (65537, 3, 5, 7), (1, 2**31, 1, 1), (2, 33, 129, 65)
]  # fmt: skip
TYPES = [
    ("float16", "float16", "ieee"), ("bfloat16", "float32", "ieee"), ("float32", "float32", "ieee"),
    ("float32", "float32", "tf32"), ("float32", "bfloat16", "tf32"), ("float64", "float64", "ieee"),
    ("int8", "int32", "ieee"), ("float8_e4m3fn", "bfloat16", "ieee"), ("float8_e5m2", "float32", "ieee"),
]  # fmt: skip
ODD_MATMULS = [
    MatmulProblem(*size, dtype, out, a_layout=a, b_layout="strided", a_align=align, precision=precision)
    for size, (dtype, out, precision), a, align in zip(
        SIZES * 3, TYPES * 2, ("row", "column", "strided") * 6, (1, 2, 4, 8, 16, 16) * 3, strict=True
    )
]
ODD_TURNS = [
    PermuteProblem((), (), (), 1, 1, 1),
    PermuteProblem((2**33,), (1,), (1,), 16),
    PermuteProblem((2**33,), (3,), (1,), 2, 2, 2),
    PermuteProblem((65537, 5, 3), (30, 2, 10), (90, 6, 2), 8, 8, 8),
    PermuteProblem((2, 1009, 997), (997 * 1009, 1, 1009), (997 * 1009, 997, 1), 4, 4, 4),
    PermuteProblem.of((3, 5, 7, 11, 13), (1001, 1, 143, 13, 5), (5005, 1001, 143, 13, 1), 2),
    PermuteProblem((1000, 1000), (0, 0), (1000, 1), 4),
]
# One of those whose configs are legal alike.
APART = {(device.arch, device.shared_memory): name for name, device in TARGETS.items()}


@pytest.mark.parametrize("name", APART.values())
def test_there_is_a_legal_config_for_every_problem(name):
    device = TARGETS[name]
    # Every second has each type once.
    for problem in (*(ODD_MATMULS if name == "sm_90" else ODD_MATMULS[::2]), *ODD_TURNS):
        if name == "sm_80" and getattr(problem, "dtype", "").startswith("float8"):
            continue
        configs = legal_configs(problem, device)
        assert configs, problem
        assert len(set(configs)) == len(configs)
        assert [c for c in configs[::9] if illegal(c, problem, device) is not None] == []


@pytest.mark.parametrize(
    ("problem", "name"),
    [(problem, ("sm_90", "gfx942")[i % 2]) for i, problem in enumerate([*ODD_MATMULS[::4], *ODD_TURNS[::2]])],
    ids=lambda given: getattr(given, "label", given),
)
def test_the_model_ranks_by_its_times(name, problem):
    device = TARGETS[name]
    order = model.ranked(problem, device)
    times = [model.predict_us(config, problem, device) for config in order]
    assert times == sorted(times)
    assert all(0 < us < float("inf") for us in times)
    assert model.pick(problem, device) == order[0]
    assert set(order) == set(legal_configs(problem, device))


@pytest.mark.parametrize("problem", [SQUARE, TURN], ids=lambda problem: problem.op)
def test_what_is_screened_first(problem):
    legal, pick = legal_configs(problem, HOPPER), model.pick(problem, HOPPER)
    for count in (1, 40, 100_000):
        chosen = model.screened(problem, HOPPER, count)
        assert len(chosen) == min(count, len(legal)) == len(set(chosen))
        assert chosen[0] == pick
        assert set(chosen) <= set(legal)


@pytest.mark.parametrize("align", [2, 4])
def test_deep_pipelines_are_for_copies_of_4_bytes_or_more(align):
    """Shorter ones are not asynchronous, and of several stages hold nothing in flight."""
    ragged = replace(SQUARE, a_align=align)
    deep = [config for config in legal_configs(ragged, SMALL, "tile") if config.num_stages > 3]
    assert bool(deep) == (align >= 4)


def test_parts_of_k_may_be_one_block_each():
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}
    shared = Config.of(4, 4, "descriptor", **blocks, PERSISTENT=False, SPLIT_K=4, SUBTILES=1)
    assert illegal(shared, replace(SQUARE, k=256), HOPPER) is None
    assert "without a block of K = 255" in illegal(shared, replace(SQUARE, k=255), HOPPER)


@pytest.mark.parametrize("family", ["descriptor", "warpgroups"])
def test_results_wider_than_operands_take_more_shared_memory(family):
    """As sums of 16-bit operands do that are stored in fp32, through shared memory."""
    wide = replace(SQUARE, m=4096, n=4096, out_dtype="float32")
    configs = FAMILIES["matmul"][family].configs
    narrow = replace(wide, out_dtype="float16")
    apart = [c for c in configs if illegal(c, wide, HOPPER) and not illegal(c, narrow, HOPPER)]
    assert apart
    assert all("bytes of shared memory" in illegal(config, wide, HOPPER) for config in apart)


@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "column"), ("column", "row")], ids=str)
def test_warpgroups_take_bytes_along_k_alone(layouts):
    a_layout, b_layout = layouts
    config = FAMILIES["matmul"]["warpgroups"].configs[0]
    turned = replace(FP8, a_layout=a_layout, b_layout=b_layout)
    assert "bytes must lie along K" in illegal(config, turned, HOPPER)
    assert illegal(config, replace(FP8, b_layout="column"), HOPPER) is None


ADA = TARGETS["nvidia-geforce-rtx-4090"]
FAST = replace(FP8, precision="fast")
PARTS = replace(FP32, precision="fp16x3").core


@pytest.mark.parametrize(
    ("problem", "device", "blocks", "most"),
    [
        (FP8, HOPPER, {"m": 64}, 128),
        (FP8, HOPPER, {"m": 256, "warps": 8}, 128),
        (replace(FP8, dtype="float8_e5m2", b_dtype="float8_e4m3fn"), HOPPER, {"m": 64}, 128),
        (FAST, HOPPER, {"m": 64}, None),
        (FP8, HOPPER, {"m": 16}, None),  # by mma.sync: fp8 is multiplied as fp16
        (FP8, HOPPER, {"m": 64, "warps": 2}, None),
        (FP8, ADA, {"m": 64}, None),
        (FP8, TARGETS["sm_100"], {"m": 64}, None),
        (SQUARE, HOPPER, {"m": 64}, None),
        (PARTS, HOPPER, {"m": 64}, 64),
        (PARTS, HOPPER, {"m": 16}, 64),
        (PARTS, ADA, {"m": 64}, 64),
    ],
    ids=str,
)
def test_how_much_of_k_tensor_cores_may_sum(problem, device, blocks, most):
    """Hopper's truncate sums of fp8; those of parts of fp32 are promoted on every GPU."""
    for k in (32, 64, 128, 256):
        fault = late_fault(tile(k=k, **blocks), problem, device)
        late = most is not None and k > most
        assert fault == (f"BLOCK_K = {k}: a sum of {most} is precise" if late else None)


@pytest.mark.parametrize(("problem", "family"), [(FP8, "tile"), (FP8, "descriptor")], ids=str)
def test_families_refuse_late_sums_of_fp8(problem, family):
    fast = replace(problem, precision="fast")
    deep = [
        config
        for config in FAMILIES[problem.op][family].configs
        if config["BLOCK_K"] == 256 and not illegal(config, fast, HOPPER)
    ]
    late = [config for config in deep if config["BLOCK_M"] >= 64 and config.num_warps >= 4]
    assert late
    assert all("a sum of 128 is precise" in illegal(config, problem, HOPPER) for config in late)


BEST, SECOND, TABLED = tile(group=1), tile(n=128), tile(k=64)
NEIGHBOUR = replace(SQUARE, m=1536)


@functools.cache
def likely(place):
    """Return the config that the model ranks there; ranking takes a second."""
    return model.ranked(SQUARE, HOPPER)[place]


def remember(problem, config, us, device=HOPPER, **rest):
    digest = FAMILIES[problem.op][config.family if config.family in FAMILIES[problem.op] else "tile"].digest
    store_of(device).add(digest, Trial(problem, config, us, measured_utc="2026-01-01T00:00:00+00:00", **rest))


def ship(monkeypatch, *pairs, current=True):
    entries = tuple(Entry(problem, config, 11.0) for problem, config in pairs)
    kernels = digests() if current else {}
    shipped = Table(HOPPER.to_dict(), kernels, entries)
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: (shipped,) if device == HOPPER else ())


def planned(problem=SQUARE, device=HOPPER, mode=None):
    found = plans.plan_for(problem, device, mode)
    return found and (found.source, found.config)


def test_each_rung_beats_the_next(monkeypatch):
    assert planned() == ("model", likely(0))
    remember(NEIGHBOUR, likely(1), 12.0)
    tritile.forget()
    assert planned() == ("model", likely(0))  # what was measured of other sizes says nothing of these
    ship(monkeypatch, (SQUARE, TABLED))
    tritile.forget()
    assert planned() == ("table", TABLED)
    remember(SQUARE, SECOND, 30.0)  # slower than the table says, yet measured here
    tritile.forget()
    assert planned() == ("exact", SECOND)
    remember(SQUARE, BEST, 20.0)
    tritile.forget()
    assert planned() == ("exact", BEST)
    assert plans.plan_for(SQUARE, HOPPER).us == 20.0


@pytest.mark.parametrize(("problem", "config"), [(SQUARE, BEST), (TURN, turned())], ids=["product", "turn"])
def test_a_plan_is_remembered_until_forgotten(problem, config):
    first = plans.plan_for(problem, HOPPER)
    assert first.source == "model"
    remember(problem, config, 20.0)
    assert plans.plan_for(problem, HOPPER) is first
    tritile.forget()
    assert planned(problem) == ("exact", config)


def test_strict_wants_a_measurement(monkeypatch):
    for prepare in (lambda: None, lambda: remember(NEIGHBOUR, likely(1), 12.0)):
        prepare()
        with pytest.raises(NotTunedError, match="1024x1024x1024 NN float16 on NVIDIA H200"):
            planned(mode="strict")
        tritile.forget()
    ship(monkeypatch, (SQUARE, TABLED), current=False)  # measured, but of another version of the kernel
    with pytest.raises(NotTunedError):
        planned(mode="strict")
    assert planned(mode="cached") == ("table", TABLED)
    tritile.forget()
    ship(monkeypatch, (SQUARE, TABLED))
    assert planned(mode="strict") == ("table", TABLED)
    remember(SQUARE, BEST, 20.0)
    tritile.forget()
    assert planned(mode="strict") == ("exact", BEST)


def test_tune_asks_to_measure_what_is_not_measured_here_and_off_reads_nothing(monkeypatch):
    assert planned(mode="tune") is None
    remember(NEIGHBOUR, likely(1), 12.0)
    ship(monkeypatch, (SQUARE, TABLED))
    assert planned(mode="tune") is None
    remember(SQUARE, BEST, 20.0)
    assert planned(mode="tune") == ("exact", BEST)
    assert planned(mode="off") == ("model", likely(0))


ILLEGAL = [tile(m=8), tile(m=512, n=512), tile(family="other"), tile(k=128, stages=8), Config.of(BLOCK_M=1)]


@pytest.mark.parametrize("config", ILLEGAL, ids=str)
def test_an_illegal_config_is_refused_wherever_it_lies(monkeypatch, config):
    remember(SQUARE, config, 0.001)
    remember(NEIGHBOUR, config, 0.001)
    ship(monkeypatch, (SQUARE, config), (replace(SQUARE, n=1000), config))
    assert planned()[0] == "model"
    with pytest.raises(NotTunedError):
        planned(mode="strict")
    remember(SQUARE, BEST, 20.0)
    tritile.forget()
    assert planned() == ("exact", BEST)


def test_failures_and_what_another_kernel_source_measured_never_win():
    store_of(HOPPER).add("0" * 16, Trial(SQUARE, SECOND, 2.0))
    remember(SQUARE, SECOND, None, failure="did not compile")
    assert planned()[0] == "model"
    remember(SQUARE, likely(1), 1.0, failure="wrong answer")
    remember(SQUARE, BEST, 20.0)
    tritile.forget()
    assert planned() == ("exact", BEST)


def test_a_plan_reads_well():
    remember(SQUARE, BEST, 20.25)
    text = repr(tritile.plan(SQUARE, device=HOPPER))
    for word in ("1024x1024x1024 NN float16", "NVIDIA H200", "BLOCK_M=64", "num_warps=4", "exact", "20.2 us"):
        assert word in text
    assert text.count("\n") == 3
    assert "None" not in repr(tritile.plan(NEIGHBOUR, device=HOPPER))


def test_plan_of_host_tensors():
    a, b = torch.zeros(3, 100, 70).half(), torch.zeros(70, 33).half()
    found = tritile.plan(tritile.matmul, a, b)
    assert found.source == "host"
    assert (found.problem.batch, found.problem.m, found.problem.n, found.problem.k) == (1, 300, 33, 70)
    turned_plan = tritile.plan(tritile.transpose, torch.zeros(5, 7, 9), 0, 2)
    assert (turned_plan.source, turned_plan.problem.itemsize) == ("host", 4)
    there = tritile.plan(tritile.matmul, a, b, device=target_device("nvidia-h200"))
    assert (there.source, there.device.name) == ("model", "NVIDIA H200")


def test_plan_of_a_problem_for_a_gpu_that_is_not_here():
    found = tritile.plan(SQUARE, device=target_device("nvidia-h200"))
    assert (found.source, found.problem, found.device.name) == ("model", SQUARE, "NVIDIA H200")
    with tritile.mode("tune"):  # nothing is measured by asking
        assert tritile.plan(SQUARE, device=target_device("sm_80")).source == "model"
    with tritile.mode("strict"), pytest.raises(NotTunedError):
        tritile.plan(SQUARE, device=target_device("sm_80"))


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
        tritile.plan(what, device=HOPPER)
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
    with pytest.raises(InvalidValueError, match="target_device"):
        tritile.plan(SQUARE)


def test_a_problem_that_a_gpu_cannot_run_says_so():
    with pytest.raises(UnsupportedError, match=r"8\.9"):
        legal_configs(FP8, TARGETS["sm_80"])
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn.*8\.9"):
        tritile.plan(FP8, device=target_device("sm_80"))
    with pytest.raises(TritileError):
        tritile.plan(FP64, device=replace(SMALL, shared_memory=512))


def test_a_problem_is_tuned_and_has_an_incumbent_once_an_answer_was_checked():
    """Quick looks of every family are not enough."""
    for family in model.families(SQUARE, HOPPER):
        remember(SQUARE, model.ranked(SQUARE, HOPPER, family)[0], 10.0)
    assert not is_tuned(SQUARE, HOPPER)
    assert task_of(SQUARE, HOPPER).incumbent is None
    remember(SQUARE, SECOND, 20.0, error=1e-4)
    assert is_tuned(SQUARE, HOPPER)
    assert task_of(SQUARE, HOPPER).incumbent == SECOND


def test_a_geforce_sums_in_fp32_at_half_the_rate():
    geforce = TARGETS["nvidia-geforce-rtx-4090"]
    other = replace(geforce, name="NVIDIA RTX 6000 Ada Generation")
    whole = {"int8", "float64"}
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "int8", "float64"):
        problem = MatmulProblem(1, 8192, 8192, 8192, dtype, dtype)
        assert rate(problem, geforce) == rate(problem, other) * (1.0 if dtype in whole else 0.5)
    halves = MatmulProblem(1, 8192, 8192, 8192, "float16", "float16")
    assert peak_tflops(halves, geforce) == pytest.approx(165.2, rel=0.01)  # as its maker says
    assert peak_tflops(halves, TARGETS["nvidia-l40s"]) == pytest.approx(362, rel=0.02)
