"""The grid of mixed alignments, as far as no GPU is needed: that tensors pose what it says."""

import itertools
import json

import pytest
import torch

import alignments
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import problem_to_dict
from tritile.core.views import posed
from tritile.lab.report.results import Measurement
from tritile.ops.described import described
from tritile.tune.subject import torch_calls

GRID = alignments.grid()
ENV = {"gpu": "GPU", "time": "2026-01-01T00:00:00+00:00"}


def on_no_device(dtype, elements):
    return torch.empty(elements, dtype=getattr(torch, dtype), device="meta")


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_tensors_of_a_case_start_their_rows_where_it_says(case):
    a, b, out = (tensor[0] for tensor in torch_calls.matrices(posed(case.problem, on_no_device)))
    assert (a.shape, b.shape, out.shape) == ((case.m, case.k), (case.k, case.n), (case.m, case.n))
    call = described(a, b, out, "ieee")
    assert call.problem == case.problem
    assert (call.problem.a_align, call.problem.b_align, call.problem.out_align) == case.aligns
    leading = [max(tensor.stride()) * tensor.element_size() for tensor in (a, b, out)]
    for stride, align in zip(leading, case.aligns, strict=True):
        assert stride % align == 0
        assert align == 16 or stride % (2 * align) != 0


def test_layouts_are_those_of_their_names():
    case = alignments.mixed(16, 24, 40, "TN", (8, 16, 4))
    a, b, out = (tensor[0] for tensor in torch_calls.matrices(posed(case.problem, on_no_device)))
    assert (a.stride(), b.stride(), out.stride()) == ((1, 20), (24, 1), (26, 1))


def test_the_grid_covers_what_it_is_to_cover():
    assert len(GRID) == len(set(GRID)) <= 210
    every = set(itertools.product(alignments.BYTES, repeat=3)) - {(16, 16, 16)}
    assert {case.aligns for case in GRID if case.dtype == "bfloat16"} == every
    for size in alignments.SIZES:
        some = [c for c in alignments.spread() if (c.m, c.n, c.k) == size]
        cells = {(min(c.aligns[:2]), c.layout) for c in some}
        assert cells == set(itertools.product(alignments.BYTES, alignments.LAYOUTS))
        assert len({c.aligns for c in some}) == 12


def line(case, torch_us=20.0, gpu="GPU", **env):
    measured = Measurement(10.0, torch_us, None, 0.01, 1e-3, 2e-3, None, Config.of(BLOCK_M=64), "model")
    return alignments.line_of(case, measured, ENV | {"gpu": gpu} | env)


def test_lines_are_kept_in_the_place_of_older_ones(tmp_path):
    path = tmp_path / "gpu" / "alignments.json"
    first, other = GRID[:2]
    for new in (line(first), line(other), line(first, 30.0), line(first, gpu="Other")):
        alignments.keep(path, new)
    assert json.loads(path.read_text()) == [line(first, 30.0), line(other), line(first, gpu="Other")]


def test_groups_go_by_the_least_aligned_operand_and_the_result():
    cases = [
        alignments.mixed(16, 16, 16, "NN", aligns)
        for aligns in ((16, 8, 16), (8, 2, 4), (2, 16, 4), (16, 16, 2))
    ]
    lines = [line(case, torch_us) for case, torch_us in zip(cases, (20.0, 40.0, 5.0, 30.0), strict=True)]
    found = {kind: [one["torch_us"] for one in some] for kind, some in alignments.groups_of(lines).items()}
    assert found == {
        (2, 0): [5.0, 40.0], (2, 4): [5.0, 40.0], (8, 0): [20.0], (8, 16): [20.0],
        (16, 0): [30.0], (16, 2): [30.0],
    }  # fmt: skip
    table = alignments.table_of(lines)
    assert [column._cells[0] for column in table.columns] == [
        "2", "any", "2", "0.50", "1.41", "4.00", "1", "16x16x16 NN bfloat16 2/16/4, model",
    ]  # fmt: skip


def test_what_one_case_raises_costs_itself_alone(monkeypatch, tmp_path, capsys):
    compiled = []

    def measured(case):
        if case.aligns == (16, 2, 16):
            raise RuntimeError("refused")
        return Measurement(10.0, 20.0, None, 0.01, 1e-3, 2e-3, None, Config.of(BLOCK_M=64), "model")

    monkeypatch.setattr(alignments.device, "current_gpu", lambda: TARGETS["nvidia-h200"])
    monkeypatch.setattr(alignments, "compile_all", lambda cases, gpu: compiled.extend(cases))
    monkeypatch.setattr(alignments.bench, "measured", measured)
    path = tmp_path / "alignments.json"
    monkeypatch.setattr("sys.argv", ["alignments.py", "--only", "4096x1500x4001 NT", "--results", str(path)])
    assert alignments.main() == 1
    said = capsys.readouterr()
    assert "4096x1500x4001 NT bfloat16 16/2/16: " in said.err
    assert "refused" in said.err
    kept = [line["problem"] for line in json.loads(path.read_text())]
    wanted = [case.problem for case in compiled if case.aligns != (16, 2, 16)]
    assert kept == [problem_to_dict(problem) for problem in wanted]
    assert 1 < len(kept) < len(compiled)
    monkeypatch.setattr("sys.argv", ["alignments.py", "--only", "4096x500x1500 NT", "--results", str(path)])
    assert alignments.main() == 0


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(alignments.device, "current_gpu", lambda: None)
    monkeypatch.setattr("sys.argv", ["alignments.py"])
    assert alignments.main() == 1
    assert "no GPU" in capsys.readouterr().err
