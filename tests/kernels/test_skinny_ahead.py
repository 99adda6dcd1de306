"""Products of few rows compiled for GPUs that are not here: they fit, and read the matrix in words."""

import re
from dataclasses import replace

import pytest

from tests.ahead import H200, IS_FITTED, compiled, fitted, instructions, later
from tritile.choose import waves
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem
from tritile.families import launching
from tritile.families.odd_rows import family as odd_rows
from tritile.families.skinny import family_k, family_n
from tritile.families.space import legal_configs
from tritile.runtime import ahead
from tritile.runtime.ahead import resources

EVEN = MatmulProblem(1, 2, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
ODD = replace(EVEN, n=4099, k=4099, a_align=2, b_align=2, out_align=2)
FP32 = replace(ODD, dtype="float32", out_dtype="float32", a_align=4, b_align=4, out_align=4)
ALONG = (EVEN, ODD, FP32)
ACROSS = tuple(replace(problem, b_layout="row") for problem in ALONG)
ODD_ROWS = replace(ODD, m=64, n=8191, k=8191)


@pytest.mark.parametrize("m", [later(1), later(4), 8])
@pytest.mark.parametrize("problem", ALONG, ids=str)
def test_skinny_fits_without_spills(m, problem):
    problem = replace(problem, m=m)
    for config in waves.with_margins(problem, H200)[:2]:
        taken = resources(launching.compiled_for(problem, config, H200))
        assert taken.spills == 0
        most = max(1024, family_k.shared_bytes(config, problem))  # 1024 to sum over threads
        assert taken.shared <= most or not IS_FITTED


@pytest.mark.parametrize(
    ("problem", "stages", "load"),
    [(EVEN, 4, "LDGSTS"), (ODD, 1, "LDG"), later(EVEN, 1, "LDG"), later(ODD, 4, "LDGSTS")],
    ids=str,
)
def test_matrix_read_in_words(problem, stages, load, tmp_path):
    config = Config.of(4, stages, "skinny_k", BLOCK_M=2, BLOCK_N=16, BLOCK_K=512 if stages == 1 else 256)
    kernel = compiled(problem, config)
    assert ahead.resources(kernel).spills == 0
    found = re.findall(rf"\b{load}\.[\w.]*128\b", instructions(kernel, tmp_path))
    # 4 or 8 words of the tile for each thread, of every stage before the loop and of one in it
    assert len(found) >= (8 if stages == 1 else 4 * stages)


LOADS = ("LDG.E.128", "LDG.E.U16", "LDG.E")


@fitted
@pytest.mark.parametrize("count", [1, later(3)])
@pytest.mark.parametrize(("problem", "load"), zip(ACROSS, LOADS, strict=True), ids=str)
def test_w_read_without_shared_memory(problem, load, count, tmp_path):
    """As wide as it is aligned."""
    problem = replace(problem, m=1, a_align=16)
    for config in legal_configs(problem, H200, family_n.NAME)[:count]:
        kernel = compiled(problem, config)
        assert ahead.resources(kernel).spills == 0
        text = instructions(kernel, tmp_path)
        found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([\w.]+)", text, re.MULTILINE)
        own, unroll, wide = family_n._shape(config, problem)
        assert found.count(load) >= unroll * own // wide
        ptx = kernel.asm["ptx"]  # in the order of the source: threads exchange sums alone
        assert "bar.sync" not in ptx[: ptx.rindex("ld.global")]


@fitted
@pytest.mark.parametrize(("m", "every"), [(8, 2), *(later(m, 1) for m in (1, 2, 4, 8))])
def test_programs_fit_the_registers(m, every):
    """Programs that share K run at once."""
    for problem in ACROSS:
        problem = replace(problem, m=m, a_align=16 if m == 1 else problem.a_align)
        for config in legal_configs(problem, H200, family_n.NAME)[::every]:
            taken, threads = resources(launching.compiled_for(problem, config, H200)), 32 * config.num_warps
            held = 65536 // (threads * -(-taken.registers // 8) * 8)
            assert taken.spills == 0
            assert family_n.resident(config, problem, H200) <= held, (config, problem, taken)


@pytest.mark.parametrize(("m", "every"), [(9, 3), *(later(m, 1) for m in (9, 32, 64, 128, 200))])
def test_odd_rows_read_in_words(m, every, tmp_path):
    problem = replace(ODD_ROWS, m=m)
    configs = [c for c in legal_configs(problem, H200, odd_rows.NAME) if c["SPLIT_K"] <= 2]
    for config in configs[::every]:
        kernel = compiled(problem, config)
        taken = ahead.resources(kernel)
        assert taken.spills == 0
        assert taken.shared <= odd_rows.shared_bytes(config, problem, H200)
        copies = re.findall(r"\bLDGSTS\.[\w.]*", instructions(kernel, tmp_path))
        assert copies
        assert all(".128" in copy for copy in copies)
