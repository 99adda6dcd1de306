"""float32 products of float16 parts compiled ahead of time: they fit, and tensor cores run on."""

import re
from dataclasses import replace

import pytest

from tests.ahead import H200, fits, groups, instructions, kernels_of, later
from tests.configs import tile, tma
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import UnsupportedError
from tritile.families.space import illegal, legal_configs
from tritile.planning import model
from tritile.runtime.ahead import resources

SQUARE = MatmulProblem(1, 4096, 4096, 4096, "float32", "float32", precision="fp16x3")
RAGGED = MatmulProblem(
    3, 1001, 1003, 9973, "float32", "float32", "column", "column", a_align=4, b_align=4, out_align=4,
    precision="fp16x3", epilogue="bias=row gelu",
)  # fmt: skip
ALONG = replace(SQUARE, b_layout="column")
LONG = replace(SQUARE, m=512, n=512, k=20000, a_layout="strided", b_layout="strided")


def loops(text):
    """The bodies of a program's loops: from a label to a jump back to it."""
    lines, places, bodies = text.splitlines(), {}, []
    for i, line in enumerate(lines):
        label = re.match(r"\s*\.(L_x_\d+):", line)
        jump = re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)
        if label:
            places[label[1]] = i
        elif jump and jump[1] in places:
            bodies.append("\n".join(lines[places[jump[1]] : i]))
    return bodies


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sm_80", SQUARE),
        ("nvidia-h200", RAGGED),
        ("nvidia-h200", LONG),
        ("nvidia-h200", ALONG),
        ("sm_100", RAGGED),
    ],
    ids=str,
)
def test_every_launch_compiles_and_fits(name, problem):
    device = target_device(name)
    config = tile(128, 64, 32, 8, 3) if name == "sm_80" else model.pick(problem, device)
    assert illegal(config, problem, device) is None
    made = kernels_of(problem, config, device)
    names = [kernel.name for kernel in made]
    assert names[:2] == ["reset" if problem is ALONG else "find_peaks", "split"]
    assert names[2] == "matmul_tile"
    for kernel in made:
        assert fits(resources(kernel), device)
    assert made[-1].name == {"tile": "matmul_tile"}.get(config.family, f"matmul_{config.family}")


ROWS, TURNED = ("row", "row"), ("row", "column")


@pytest.mark.parametrize(
    ("config", "layouts"),
    [
        (groups(128, 192, 64, 2, 3, persistent=True), ROWS),
        (groups(192, 128, 64, 3, 3, persistent=True), TURNED),
        (groups(64, 96, 64, 1, 4), ROWS),
        later(groups(128, 192, 64, 2, 3, persistent=True), TURNED),
        later(groups(64, 96, 64, 1, 4), TURNED),
    ],
    ids=str,
)
def test_warpgroups_add_up_in_a_loop_about_one_that_runs_on(config, layouts, tmp_path):
    problem = replace(SQUARE, a_layout=layouts[0], b_layout=layouts[1])
    assert illegal(config, problem, H200) is None
    kernel = kernels_of(problem, config)[-1]
    assert resources(kernel).spills == 0
    bodies = [body for body in loops(instructions(kernel, tmp_path)) if "HGMMA" in body]
    inner = [body for body in bodies if body.count("WARPGROUP.DEPBAR") == 1]
    assert len(inner) >= config["CONSUMERS"]  # of small terms
    assert all(body.count("FADD") == 0 for body in inner)
    assert sum(body.count("FADD") > 0 for body in bodies) >= config["CONSUMERS"]  # of large ones
    sums = config["BLOCK_M"] // config["CONSUMERS"] * config["BLOCK_N"] // 128  # of a thread
    assert 4 * sums in [body.count("FADD") for body in bodies]  # `carried_sum`, as it is written


BY_DESCRIPTOR = (
    tma(128, 128, 64, 8, 4),
    tma(128, 128, 64, 8, 4, persistent=True),
    tma(64, 64, 64, 4, 4, split=4),
)


@pytest.mark.parametrize("config", BY_DESCRIPTOR, ids=str)
def test_descriptor_kernels_run_on_too(config, tmp_path):
    kernel = kernels_of(SQUARE, config)[-1]
    assert resources(kernel).spills == 0
    text = instructions(kernel, tmp_path)
    assert 1 <= text.count("WARPGROUP.ARRIVE") < text.count("HGMMA")
    assert text.count("FADD") > 0  # the compiler has not made one sum of it


def test_totals_are_counted_among_registers():
    half = replace(SQUARE, dtype="float16", precision="ieee")
    for config in (groups(128, 256, 64, 2, 3, persistent=True, subtiles=2), tma(128, 256, 64, 8, 3)):
        assert illegal(config, half, H200) is None
        assert "registers" in illegal(config, SQUARE, H200)
    assert "a sum of 64 is precise" in illegal(tma(64, 64, 128, 4, 3), SQUARE, H200)


def test_a_gpu_that_cannot_is_told_of():
    with pytest.raises(UnsupportedError, match="compute capability 8"):
        legal_configs(SQUARE, target_device("gfx942"))


def test_the_core_is_a_product_of_its_own():
    core = RAGGED.core
    assert (core.dtype, core.k, core.a_align, core.b_align) == ("float16", 3 * 9984, 16, 16)
    assert (core.a_layout, core.b_layout, LONG.core.a_layout, LONG.core.b_layout) == (
        "column", "column", "row", "column",
    )  # fmt: skip
    assert str(core.epilogue) == "scale_a=column scale_b=row bias=row gelu"
    assert core.core == core
