"""Products with quantized weights that are unpacked in memory first: which configs, what work, how long."""

from dataclasses import replace
from math import prod

import pytest

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.posed import posed
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.errors import UnsupportedError
from tritile.families import registry as families
from tritile.families.common.repack import repack
from tritile.families.common.work import Buffer, Descriptor, Section
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.matmul_wgmma.kernel import matmul_warpgroups
from tritile.families.quantized.unpack import unpack
from tritile.families.quantized.unpacked import dense
from tritile.families.space import contenders, illegal, legal_configs
from tritile.families.work import work_of
from tritile.planning import model
from tritile.tune.subject.problem import ProblemSpace

H200 = target_device("nvidia-h200")
PREFILL = QuantizedProblem(4096, 8192, 8192, "bfloat16", 4, 128)
RAGGED = QuantizedProblem(1000, 4097, 4100, "float16", 8, 32, True, True, "row", 8)
SIDES = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "CONSUMERS": 2}
CONFIG = Config.of(4, 4, "unpacked", **SIDES, PERSISTENT=True, SUBTILES=2)


def buffers(step):
    return [value.buffer for value in step.values if isinstance(value, Buffer | Descriptor)]


@pytest.mark.parametrize("early", [False, True])
def test_work(early):
    work = work_of(posed(PREFILL), CONFIG, H200.processors, early)
    first, last = work.steps
    assert (first.kernel, last.kernel) == (unpack, matmul_warpgroups)
    assert work.scratch == {"weight": Section("bfloat16", 8192 * 8192)}
    assert (work.counters, work.main) == (0, -1)
    assert buffers(first) == ["words", "scales", "weight"]
    assert prod(first.grid) * 16 * 256 == 8192 * 8192
    assert buffers(last) == ["x", "weight", "out", "out"]
    assert first.options["launch_pdl"] == last.options["launch_pdl"] == first.args["WAIT"] == early
    b = last.args["b_desc"]
    assert (b.shape, b.strides) == ((1, 1, 8192, 8192), (8, 8, 8192, 1))
    assert last.args["B_ROW"] is False
    assert not first.args["MASK_K"]


def test_work_with_all_there_is():
    """Rows of x are of 8 bytes, so that it is copied."""
    work = work_of(posed(RAGGED), CONFIG, H200.processors, True)
    assert [step.kernel for step in work.steps] == [unpack, repack, matmul_warpgroups]
    row = 4160  # the next multiple of 64
    assert work.scratch == {
        "weight": Section("float16", 4112 * row), "copy_a": Section("float16", 1000 * row)
    }  # fmt: skip
    first, second, last = work.steps
    assert buffers(first) == ["words", "scales", "zeros", "weight"]
    assert first.grid == (4112 // 16 * 17, 1, 1)
    assert buffers(second)[:2] == ["x", "copy_a"]
    values = last.args
    assert values["a_desc"].buffer == "copy_a"
    assert values["b_desc"][:3] == ("weight", (1, 1, 4097, 4100), (8, 8, row, 1))
    assert values["out_desc"] is None  # rows of 4097 start on 2 bytes
    assert values["out_ptr"] == Buffer("out")
    assert Buffer("bias") in values["extra"]
    assert values["extra"].count(Buffer("bias")) == 1
    assert values["EPILOGUE"] is not None
    assert (first.args["magic"], first.args["MASK_K"]) == (0x64006400, True)


def test_the_dense_problem():
    assert PREFILL.product == MatmulProblem(
        1, 4096, 8192, 8192, "bfloat16", "bfloat16", "row", "column", "row"
    )
    product = RAGGED.product
    assert (product.epilogue, product.a_align, product.b_align, product.out_align) == ("bias=row", 8, 16, 2)
    core = replace(RAGGED, x_layout="strided", n=4100).product
    assert (core.a_layout, core.out_align) == ("strided", 8)


def test_configs_are_those_of_the_dense_kernel():
    own = families.FAMILIES["linear_quantized"]["unpacked"].configs
    assert tuple(map(dense, own)) == warpgroups.FAMILY.configs
    assert {config.family for config in own} == {"unpacked"}
    legal = legal_configs(PREFILL, H200, "unpacked")
    assert [dense(c) for c in legal] == legal_configs(PREFILL.product, H200, "warpgroups")


@pytest.mark.parametrize(
    ("config", "problem", "device", "reason"),
    [
        (CONFIG, PREFILL, "sm_80", "no warpgroup instructions"),
        (CONFIG, PREFILL, "sm_100", "no warpgroup instructions"),
        (CONFIG, PREFILL, "gfx942", "no warpgroup instructions"),
        (replace(CONFIG, num_stages=8), PREFILL, "nvidia-h200", "bytes of shared memory"),
        (replace(CONFIG, num_warps=8), PREFILL, "nvidia-h200", "num_warps 4"),
        (CONFIG, replace(PREFILL, m=2**31), "nvidia-h200", "sizes above"),
        (replace(CONFIG, kwargs=CONFIG.kwargs[1:]), PREFILL, "nvidia-h200", "are not"),
    ],
)
def test_illegal_configs(config, problem, device, reason):
    assert reason in illegal(config, problem, target_device(device))
    if device != "nvidia-h200":
        with pytest.raises(UnsupportedError, match=reason):
            legal_configs(problem, target_device(device), "unpacked")
        assert "unpacked" not in model.families(problem, target_device(device))


@pytest.mark.parametrize(("m", "tried"), [(1, False), (16, False), (256, False), (257, True), (4096, True)])
def test_tried_where_a_fused_tile_has_not_all_rows(m, tried):
    """It may run elsewhere too, but nobody chooses, opens a search with, or takes it from a neighbour."""
    problem = replace(PREFILL, m=m)
    assert illegal(CONFIG, problem, H200) is None
    assert legal_configs(problem, H200, "unpacked")
    for names in (contenders(problem), model.families(problem, H200)):
        assert names.count("unpacked") == tried
    for configs in (legal_configs(problem, H200), model.screened(problem, H200, 12)):
        assert ("unpacked" in {config.family for config in configs}) == tried


def test_neighbours_step_as_those_of_the_dense_kernel():
    """Tiles of specialised warps grow by rows of a warpgroup, which a search has to know."""
    space, plain = ProblemSpace(PREFILL, H200), ProblemSpace(PREFILL.product, H200)
    found = space.neighbours(CONFIG)
    assert len(found) > 8
    assert {dense(config) for config in found} == set(plain.neighbours(dense(CONFIG)))
    assert {config.family for config in space.opening(12)} >= {"unpacked", "descriptor"}
