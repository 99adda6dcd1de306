"""Which configs are legal, and which the model likes; no GPU is asked."""

from dataclasses import replace

import pytest

from tests.configs import tma
from tritile.core.config import Config
from tritile.core.device import TARGETS, Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.families.common.rates import peak_tflops, rate
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, legal_configs
from tritile.planning import model

SMALL = Device("Small GPU", "cuda", 80, 4, 1 << 20, 49152, 1.0, 100.0)
HOPPER = TARGETS["nvidia-h200"]
SQUARE = MatmulProblem(1, 1024, 1024, 1024, "float16", "float16")
TURN = PermuteProblem.transposed(1, 1024, 1024, 2)


def tile(m=64, n=64, k=32, warps=4, stages=3, group=8, **changes):
    config = Config.of(
        family="tile", BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages
    )
    return replace(config, **changes)


def turned(m=64, n=64, warps=4, group=1, **changes):
    config = Config.of(family="tile", BLOCK_M=m, BLOCK_N=n, GROUP_M=group, num_warps=warps, num_stages=1)
    return replace(config, **changes)


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
    ("registers", tile(m=256, n=256, warps=4), SQUARE, HOPPER, "512 accumulator registers a thread, above"),
    ("registers of fp64", tile(m=128, n=64, warps=4), FP64, HOPPER, "128 accumulator registers"),
    ("fp8 before Ada", tile(), FP8, TARGETS["sm_80"], "8.9, not 8.0"),
    ("shared", tile(k=128, stages=8), SQUARE, HOPPER, "262144 bytes of shared memory, of 232448"),
    ("shared of a small GPU", tile(m=128, n=128, k=64), SQUARE, SMALL, "65536 bytes of shared memory"),
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
    shared = tma(64, 64, 64, 4, 4, split=4)
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
        late = f"BLOCK_K = {k}: a sum of {most} is precise" if most is not None and k > most else None
        reasons = [illegal(tile(k=k, **blocks), problem, device)]
        if device.has_tma:
            sides = {"m": 64, "warps": 4} | blocks
            reasons.append(illegal(tma(sides["m"], 64, k, sides["warps"]), problem, device))
        for reason in reasons:
            assert reason == late if late else "is precise" not in (reason or "")


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
