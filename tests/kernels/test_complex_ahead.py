"""What makes complex products of real ones, compiled ahead of time for GPUs that are not here."""

import re

import pytest

from tests.ahead import H200, NAMES, kernels_of, later
from tests.configs import tile
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.core.problem.complexes import form_of
from tritile.planning import model
from tritile.runtime import ahead
from tritile.runtime.offline import resources

OURS = ("lay_out", "put_together")
ODD = {"a_align": 8, "b_align": 8, "out_align": 8}
FORMS = {
    "embedded": {"m": 512, "n": 256, "k": 512},
    "embedded, odd": {"m": 501, "n": 253, "k": 505, "a_layout": "column", "b_layout": "column", **ODD},
    "embedded, gaps": {"m": 501, "n": 99, "k": 505, "b_layout": "strided", "out_layout": "strided", **ODD},
    "pairs": {"m": 16, "n": 1024, "k": 1024},
    "pairs, gaps": {"m": 17, "n": 999, "k": 77, "a_layout": "strided", "b_layout": "strided", **ODD},
    "planes": {"m": 16, "n": 1024, "k": 1024, "b_layout": "column"},
    "planes, batch": {"m": 17, "n": 999, "k": 77, "batch": 3, "b_layout": "column", **ODD},
    "three": {"m": 256, "n": 256, "k": 256, "precision": "ieee-3m"},
    "three, odd": {
        "m": 65,
        "n": 63,
        "k": 61,
        "batch": 3,
        "b_layout": "column",
        "precision": "ieee-3m",
        **ODD,
    },
}


def posed(form, dtype="complex64", **rest):
    fields = FORMS[form] | rest
    if dtype == "complex128":  # an element is 16 bytes
        fields = {name: value for name, value in fields.items() if not name.endswith("_align")}
    return MatmulProblem(**({"batch": 1} | fields), dtype=dtype, out_dtype=dtype)


def compiled(problem, device=H200):
    """Compile the kernels of a product, the middle one by a config that compiles soon."""
    return kernels_of(problem, tile(32, 32, 16, 4, 2), device)


WIDE = ("embedded, gaps", "pairs, gaps", "planes, batch", "three, odd")


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        *(("complex64", form) for form in FORMS),
        *(("complex128", form) for form in WIDE),
        *(later("complex128", form) for form in FORMS if form not in WIDE),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_compiles_and_fits(name, dtype, form):
    problem, device = posed(form, dtype), target_device(name)
    assert form_of(problem) == form.partition(",")[0]
    kernels = compiled(problem, device)
    assert {kernel.name for kernel in kernels} & set(OURS)
    for kernel in kernels:
        taken = resources(kernel)
        assert taken.shared <= device.shared_memory
        if kernel.name in OURS:
            assert taken.excess(device) is None


@pytest.mark.parametrize("form", ["embedded", "pairs", "planes", "three"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_aligned_operands_move_by_16_bytes(form, dtype):
    for kernel in compiled(posed(form, dtype)):
        if kernel.name in OURS:
            moves = set(re.findall(r"(?:ld|st)\.global\.(\S+)", kernel.asm["ptx"]))
            assert moves == {"v4.b32" if dtype == "complex64" else "v2.b64"}


def test_rows_of_an_even_size_still_move_by_16_bytes():
    kernels = compiled(posed("three", m=250, n=250, k=250))
    for kernel in (kernel for kernel in kernels if kernel.name in OURS):
        assert set(re.findall(r"(?:ld|st)\.global\.(\S+)", kernel.asm["ptx"])) == {"v4.b32"}, kernel.name


@pytest.mark.parametrize(("name", "waits"), [("nvidia-h200", True), ("sm_80", False)])
def test_they_start_early_where_gpus_let_them(name, waits):
    for kernel in compiled(posed("planes"), target_device(name)):
        if kernel.name in OURS:
            assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == waits


@pytest.mark.parametrize("form", ["embedded", "planes", "three"])
def test_the_kernel_that_computes_is_told_from_those_around_it(form):
    problem, device = posed(form, precision="tf32-3m" if form == "three" else "tf32"), target_device("sm_90")
    kernel = ahead.compiled_for(problem, model.pick(problem, device), device)
    assert kernel.name.startswith("matmul_")
    assert "tf32" in kernel.asm["ptx"]
