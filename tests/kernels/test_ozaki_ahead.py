"""The kernels of fp64 products by remainders, compiled ahead of time for GPUs that are not here."""

import struct
from dataclasses import replace

import pytest

from tests.ahead import H200, NAMES, kernels_of, later
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.ozaki import lowering as ozaki
from tritile.planning import model
from tritile.runtime.offline import check_fits, resources

SQUARE = MatmulProblem(1, 4096, 4096, 4096, "float64", "float64", precision="ozaki")
TURNED = replace(SQUARE, a_layout="column", b_layout="column")
RAGGED = MatmulProblem(
    3, 1001, 1003, 997, "float64", "float64", a_align=8, b_align=8, out_align=8, precision="ozaki"
)
ONE = MatmulProblem(1, 1, 1, 1, "float64", "float64", precision="ozaki")
LARGE = MatmulProblem(2, 60000, 40000, 70000, "float64", "float64", b_layout="column", precision="ozaki")
FUSED = replace(RAGGED, epilogue="bias=row residual=full weighted gelu")
PROBLEMS = {
    "square": SQUARE, "turned": TURNED, "ragged": RAGGED, "one": ONE, "large": LARGE, "fused": FUSED
}  # fmt: skip
OURS = ("measure_vectors", "split_residues", "join_residues", "multiply_unfit")


def compiled(problem, device=H200):
    """The kernels of the model's first config, the product itself among them."""
    return kernels_of(problem, model.pick(problem, device), device)


@pytest.mark.parametrize("problem", ["square", later("turned"), "ragged", later("one"), "large", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_and_fits(name, problem):
    device = target_device(name)
    kernels = compiled(PROBLEMS[problem], device)
    order = [kernel.name for kernel in kernels if kernel.name in OURS]
    assert order == [*OURS[:2], *OURS[:2], *OURS[2:]]
    for kernel in kernels:
        check_fits(kernel, device)
        if kernel.name in OURS:
            assert resources(kernel).spills == 0


@pytest.mark.parametrize("name", ["sm_80", "nvidia-h200"])
def test_the_int8_product_runs_on_tensor_cores(name):
    kernels = {kernel.name: kernel for kernel in compiled(SQUARE, target_device(name))}
    product = next(kernel for name, kernel in kernels.items() if name.startswith("matmul_"))
    assert "s32.s8.s8" in product.asm["ptx"]


def test_weights_reach_the_kernel_with_all_their_digits():
    kernels = {kernel.name: kernel for kernel in compiled(SQUARE)}
    text = kernels["join_residues"].asm["ptx"].upper()
    for parts in (*ozaki.WEIGHTS, ozaki.WHOLE[1:]):
        for part in parts:
            positive, negative = (struct.pack(">d", x).hex().upper() for x in (part, -part))
            assert part == 0 or f"0D{positive}" in text or f"0D{negative}" in text


def test_words_are_wide():
    kernels = {kernel.name: kernel for kernel in compiled(SQUARE)}
    assert "ld.global.v2.b32" in kernels["join_residues"].asm["ptx"]
    assert "st.global.v2.b32" in kernels["split_residues"].asm["ptx"]
