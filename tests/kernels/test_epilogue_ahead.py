"""Products with epilogues and block scales, compiled ahead of time for GPUs that are not here."""

from dataclasses import replace

import pytest

from tests.ahead import (
    NAMES,
    compiled,
    groups,
    instructions,
    kernels_of,
    later,
    pairs,
)
from tests.configs import tile, tma
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.space import illegal
from tritile.planning import model
from tritile.runtime import ahead

PLAIN = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
ODD = MatmulProblem(3, 1001, 1003, 997, "float16", "float32", a_align=2, b_align=2, out_align=4)
EPILOGUES = ("bias=row gelu", "bias=row residual=full silu", "bias=full residual=column weighted gelu_tanh")
SCALED = "scale_a=column scale_b=row bias=row relu"
FP8 = MatmulProblem(1, 2048, 2048, 2048, "float8_e4m3fn", "bfloat16", b_layout="column")
INT8 = replace(FP8, dtype="int8")


def fits(problem, config, name):
    device = target_device(name)
    assert illegal(config, problem, device) is None
    taken = ahead.compile_resources(problem, config, device)
    assert taken.excess(device) is None


BY_DESCRIPTOR = (
    tma(128, 128, 64, 8, 3, persistent=True, subtiles=2),
    tma(64, 64, 64, 4, 4, split=4),
    tma(16, 64, 128, 4, 4),
)
BY_WARPGROUPS = (groups(128, 128, 64, 2, 4, persistent=True, subtiles=2), groups(192, 96, 64, 3, 3))
HOPPER, FROM_HOPPER = ("nvidia-h200",), ("nvidia-h200", "sm_100")
READS = "bias=row residual=full gelu"
GATED = ("gated silu", "bias=row bias_up=row gated gelu")
WIDEST = [  # that read a matrix beside gelu, and how many columns there are
    (groups(128, 192, 64, 2, 4, persistent=True), 300),
    later(groups(128, 256, 64, 2, 3, persistent=True, subtiles=2), 320),
    later(groups(64, 192, 64, 1, 6), 300),
]


def cases(names, posed, epilogues):
    """Cases of (problem, config) with epilogues on GPUs, as `pairs` makes them."""
    for pair in pairs(posed, epilogues):
        (problem, config), epilogue = getattr(pair, "values", pair)
        for name in names:
            given = name, replace(problem, epilogue=epilogue), config
            yield pytest.param(*given, marks=getattr(pair, "marks", ()))


def on_plain(*configs):
    return [(PLAIN, config) for config in configs]


DOUBLE, SINGLE = (replace(PLAIN, dtype=dtype, out_dtype=dtype) for dtype in ("float64", "float32"))
CASES = [
    *cases(NAMES, [(PLAIN, tile(128, 64, 32, 8, 3)), (ODD, tile(32, 64, 32, 4, 3))], EPILOGUES),
    *cases(NAMES, [(DOUBLE, tile(32, 32, 16, 4, 2))], ["bias=full weighted gelu"]),
    *cases(FROM_HOPPER, on_plain(*BY_DESCRIPTOR), EPILOGUES),
    *cases(HOPPER, [(ODD, tma(64, 64, 64, 4, 4, persistent=True))], EPILOGUES[1:2]),  # no descriptor stores
    *cases(HOPPER, on_plain(*BY_WARPGROUPS), EPILOGUES),
    *cases(["sm_80", "gfx942"], [(INT8, tile(64, 64, 64, 4, 3))], [SCALED]),
    *cases(NAMES, [(PLAIN, tile(64, 64, 32, 8, 3)), (ODD, tile(32, 32, 32, 4, 3))], GATED),
    *cases(HOPPER, [(SINGLE, tile(32, 32, 16, 4, 2)), (DOUBLE, tile(32, 32, 16, 4, 2))], GATED[1:]),
    *cases(FROM_HOPPER, on_plain(BY_DESCRIPTOR[0], tma(64, 64, 64, 4, 4), BY_DESCRIPTOR[2]), GATED),
]


@pytest.mark.parametrize(("name", "problem", "config"), CASES, ids=str)
def test_compiles_and_fits(name, problem, config):
    fits(problem, config, name)


WIDE = [  # whether it may have gelu, and gelu beside a matrix, where tiles are stored by pointers
    (groups(128, 192, 64, 2, 4, persistent=True), True, True),
    (groups(64, 256, 64, 1, 4), True, False),
    (groups(128, 256, 64, 2, 3, persistent=True, subtiles=2), True, False),
    (groups(192, 128, 64, 3, 4, persistent=True), True, False),
    (groups(256, 144, 64, 2, 3, persistent=True, subtiles=2), False, False),
]


@pytest.mark.parametrize(("config", "alone", "beside"), WIDE, ids=str)
def test_specialised_tiles_leave_room_for_gelu(config, alone, beside):
    """Stored by pointers it spills up to kilobytes beside more sums; other activations do not."""
    device = replace(target_device("nvidia-h200"), triton="3.7.1")

    def legal(epilogue, n):
        why = illegal(
            config, replace(PLAIN, m=300, n=n, epilogue=epilogue, out_align=16 if n % 8 == 0 else 8), device
        )
        assert why is None or "accumulator registers a thread, above" in why
        return why is None

    for n in (300, 320):  # stored by pointers, and by descriptors
        assert legal("", n)
        assert legal("bias=row silu", n)
        assert legal("bias=row gelu_tanh", n)
        assert legal("bias=row gelu", n) is (alone or n == 320)
        for epilogue in (READS, "bias=full gelu"):
            assert legal(epilogue, n) is (beside or n == 320)


@pytest.mark.parametrize(("config", "n"), WIDEST, ids=str)
def test_the_widest_that_reads_a_matrix_beside_gelu_does_not_spill(config, n):
    fits(replace(PLAIN, m=300, n=n, out_align=16 if n == 320 else 8, epilogue=READS), config, "nvidia-h200")


OF_SCALED = FP8, INT8, replace(FP8, b_dtype="float8_e5m2")
OF_SCALES = tile(64, 64, 64, 4, 3), tma(64, 128, 128, 4, 3, persistent=True), tma(64, 64, 128, 4, 3, split=4)


@pytest.mark.parametrize("name", ["nvidia-h200", "sm_100"])
@pytest.mark.parametrize(("problem", "config"), pairs(OF_SCALED, OF_SCALES), ids=str)
def test_scales(name, problem, config):
    fits(replace(problem, epilogue=SCALED), config, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("epilogue", [later(EPILOGUES[0]), EPILOGUES[1], GATED[0]])
def test_the_models_pick_compiles(name, epilogue):
    problem, device = replace(PLAIN, epilogue=epilogue), target_device(name)
    taken = ahead.compile_resources(problem, model.pick(problem, device), device)
    assert taken.excess(device) is None
    assert taken.spills == 0 or epilogue != GATED[0]


def test_gated_operands_that_no_descriptor_reads_are_copied():
    problem = replace(ODD, epilogue=GATED[1])
    kernels = kernels_of(problem, tma(64, 64, 64, 4, 4, persistent=True))
    assert [kernel.name for kernel in kernels] == ["repack", "repack", "gated_descriptor"]


def test_gated_tiles_are_not_shared_nor_made_by_warpgroups():
    problem, device = replace(PLAIN, epilogue=GATED[0]), target_device("nvidia-h200")
    assert "SPLIT_K must be 1" in illegal(tma(64, 64, 64, 4, 4, split=4), problem, device)
    assert "tile and descriptor" in illegal(BY_WARPGROUPS[0], problem, device)
    assert illegal(tma(128, 256, 64, 8, 3, persistent=True, subtiles=2), problem, device).startswith(
        "256 accumulator registers"
    )
    assert model.families(problem, device) == ["tile", "descriptor"]
    plain, gated = (ahead.compile_resources(p, tma(64, 64, 64, 4, 4), device) for p in (PLAIN, problem))
    assert gated.shared == plain.shared * 3 // 2 or gated.shared > plain.shared + 4 * 64 * 64 * 2 - 1024


@pytest.mark.parametrize(
    "problem", [replace(PLAIN, epilogue=text) for text in (GATED[0], EPILOGUES[1])], ids=str
)
def test_products_of_tensor_cores_run_on_while_others_start(problem, tmp_path):
    """ptxas makes each wait for the one before where it does not see that all is well."""
    text = instructions(compiled(problem, tma(128, 128, 64, 8, 3, persistent=True)), tmp_path)
    assert 1 <= text.count("WARPGROUP.ARRIVE") < text.count("HGMMA")
