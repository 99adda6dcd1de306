"""Which configs are legal, why others are not, and that every supported target has one for every problem."""

import itertools
import random
from dataclasses import replace

import pytest

from tests.configs import tma
from tritile.core.config import Config
from tritile.core.device import TARGETS, Device, target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import FP8_DTYPES, GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.families.common.rates import peak_tflops, rate
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, legal_configs

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


@pytest.mark.parametrize(("k", "spills"), [(8191, True), (8192, False)])
def test_rows_amid_words_by_elements(k, spills):
    """A single row starts on 16 bytes whatever its length. Compiled, these loads spill 17 kB a thread."""
    dot = MatmulProblem(1, 1, 1, k, "int8", "int32", b_layout="column")
    assert bool(illegal(tile(m=16, n=64, k=256, warps=2), dot, HOPPER)) == spills


@pytest.mark.parametrize("align", [2, 4])
def test_deep_pipelines_need_4_bytes(align):
    """Shorter ones are not asynchronous, and of several stages hold nothing in flight."""
    ragged = replace(SQUARE, a_align=align)
    deep = [config for config in legal_configs(ragged, SMALL, "tile") if config.num_stages > 3]
    assert bool(deep) == (align >= 4)


def test_parts_of_one_block():
    shared = tma(64, 64, 64, 4, 4, split=4)
    assert illegal(shared, replace(SQUARE, k=256), HOPPER) is None
    assert "without a block of K = 255" in illegal(shared, replace(SQUARE, k=255), HOPPER)


@pytest.mark.parametrize("family", ["descriptor", "warpgroups"])
def test_wide_results_take_shared_memory(family):
    """As sums of 16-bit operands do that are stored in fp32, through shared memory."""
    wide = replace(SQUARE, m=4096, n=4096, out_dtype="float32")
    configs = FAMILIES["matmul"][family].configs
    narrow = replace(wide, out_dtype="float16")
    apart = [c for c in configs if illegal(c, wide, HOPPER) and not illegal(c, narrow, HOPPER)]
    assert apart
    assert all("bytes of shared memory" in illegal(config, wide, HOPPER) for config in apart)


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
def test_k_that_tensor_cores_sum(problem, device, blocks, most):
    """Hopper's truncate sums of fp8; those of parts of fp32 are promoted on every GPU."""
    for k in (32, 64, 128, 256):
        late = f"BLOCK_K = {k}: a sum of {most} is precise" if most is not None and k > most else None
        reasons = [illegal(tile(k=k, **blocks), problem, device)]
        if device.has_tma:
            sides = {"m": 64, "warps": 4} | blocks
            reasons.append(illegal(tma(sides["m"], 64, k, sides["warps"]), problem, device))
        for reason in reasons:
            assert reason == late if late else "is precise" not in (reason or "")


def test_geforce_fp32_half_rate():
    geforce = TARGETS["nvidia-geforce-rtx-4090"]
    other = replace(geforce, name="NVIDIA RTX 6000 Ada Generation")
    whole = {"int8", "float64"}
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "int8", "float64"):
        problem = MatmulProblem(1, 8192, 8192, 8192, dtype, dtype)
        assert rate(problem, geforce) == rate(problem, other) * (1.0 if dtype in whole else 0.5)
    halves = MatmulProblem(1, 8192, 8192, 8192, "float16", "float16")
    assert peak_tflops(halves, geforce) == pytest.approx(165.2, rel=0.01)  # as its maker says
    assert peak_tflops(halves, TARGETS["nvidia-l40s"]) == pytest.approx(362, rel=0.02)


# --- Every target has a legal config of a Triton kernel, whatever else may run its problems

GPUS = "a100", "l40s", "h200", "b200", "mi300x"
HALVES = "float16", "bfloat16"
OUTS = {  # (dtype, precision), and the dtypes of results
    **{(half, "ieee"): (half, "float32") for half in HALVES},
    **{("float32", precision): ("float32",) for precision in ("ieee", "tf32", "fp16x3")},
    ("float64", "ieee"): ("float64",),
    **{(fp8, precision): ("bfloat16", "float32") for fp8 in FP8_DTYPES for precision in ("ieee", "fast")},
    ("int8", "ieee"): ("int32", "bfloat16"),
}
PLAIN = "", "bias=row gelu", "residual=full silu", "bias=full weighted", "scale_a=column scale_b=row bias=row"
GATED = "gated silu", "bias=row bias_up=row gated gelu"
SIZES = [
    (1, 1024, 1024, 1024), (1, 3, 1024, 1024), (1, 1024, 1, 1024), (3, 131, 77, 35), (2, 33, 129, 65),
    (1, 1, 1, 1), (1, 1, 8192, 3), (7, 997, 1, 1009), (65537, 3, 5, 7), (1, 2**31, 1, 1),
]  # fmt: skip
LAYOUTS = "row", "column", "strided"
FLAGS = False, True


def products(dtype, precision):
    """A sixth of all combinations, drawn: any three of their values still meet."""
    gated = GATED if dtype in ("float64", "float32", *HALVES) and precision != "fp16x3" else ()
    odd = MatmulProblem(1, 1, 1, 1, dtype, dtype).itemsize
    aligns = (16, 16), (odd, odd), (16, odd)
    epilogues = *PLAIN, *gated
    combinations = list(
        itertools.product(
            SIZES, OUTS[dtype, precision], LAYOUTS, LAYOUTS, LAYOUTS[:2], aligns, epilogues, FLAGS
        )
    )
    for size, out_dtype, a, b, out, (align, out_align), epilogue, invariant in random.Random(0).sample(
        combinations, len(combinations) // 6
    ):
        base = MatmulProblem(*size, dtype, out_dtype, a, b, out, align, align, out_align, precision)
        yield replace(base, epilogue=epilogue, invariant=invariant)


def groups():
    kinds = (("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"))
    for (dtype, precision), a, b, align, invariant in itertools.product(
        kinds, LAYOUTS[:2], LAYOUTS[:2], (16, 4), FLAGS
    ):
        yield GroupedProblem(
            4, 512, 384, 256, dtype, dtype, a, b, "row", align, align, align, precision, invariant=invariant
        )  # fmt: skip


def packed():
    for m, dtype, bits, group, zeros, bias, layout, align, invariant in itertools.product(
        (1, 64, 1024), HALVES, (4, 8), (32, 64, 128), FLAGS, FLAGS, LAYOUTS[::2], (16, 2), FLAGS
    ):
        yield QuantizedProblem(m, 384, 520, dtype, bits, group, zeros, bias, layout, align, invariant)


def permutations():
    for size, batch, m, n in itertools.product((1, 2, 4, 8, 16), (1, 3), (1003, 1024), (3, 2048)):
        yield PermuteProblem.transposed(batch, m, n, size)
    yield PermuteProblem((), (), (), 1, 1, 1)
    yield PermuteProblem((2**33,), (1,), (1,), 16)
    yield PermuteProblem((2**33,), (3,), (1,), 2, 2, 2)
    yield PermuteProblem((65537, 5, 3), (30, 2, 10), (90, 6, 2), 8, 8, 8)
    yield PermuteProblem((2, 1009, 997), (997 * 1009, 1, 1009), (997 * 1009, 997, 1), 4, 4, 4)
    yield PermuteProblem.of((3, 5, 7, 11, 13), (1001, 1, 143, 13, 5), (5005, 1001, 143, 13, 1), 2)
    yield PermuteProblem((1000, 1000), (0, 0), (1000, 1), 4)


def is_supported(problem, device):
    """False for what has no config by rule: a target that loses its last config has to be named here."""
    if not isinstance(problem, MatmulProblem):
        return True
    if problem.dtype in FP8_DTYPES and 0 < device.nvidia < 89:
        return False
    if problem.precision == "tf32" and problem.invariant and device.has_tma:
        return problem.out_layout == "row" or problem.n == 1  # TMA rounds, and stores rows
    return problem.precision != "fp16x3" or (device.nvidia >= 80 and not problem.invariant)


def assert_each_has_a_config(problems, device):
    recent, without = [], []  # configs that were legal are tried first: spaces hold thousands
    for problem in problems:
        if not is_supported(problem, device):
            continue
        spaces = [recent, *(family.configs for family in FAMILIES[problem.op].values())]
        tried = itertools.chain.from_iterable(spaces)
        config = next((each for each in tried if illegal(each, problem, device) is None), None)
        if config is None:
            without.append(problem.label)
        elif config not in recent:
            recent.insert(0, config)
    assert not without, f"{len(without)}: {without[:5]}"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("dtype", "precision"), OUTS)
def test_every_product_has_a_legal_config(dtype, precision, gpu):
    assert_each_has_a_config(products(dtype, precision), target_device(gpu))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("made", [groups, packed, permutations])
def test_other_operations_have_legal_configs(made, gpu):
    assert_each_has_a_config(made(), target_device(gpu))
