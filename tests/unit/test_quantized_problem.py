"""Problems with quantized weights: as values, posed, in suites and results, planned."""

from dataclasses import replace

import pytest
import torch

import tritile
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import QuantizedProblem
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families.space import illegal
from tritile.lab import results
from tritile.lab.results import summary
from tritile.ops.linear_quantized import quantized_call
from tritile.planning import model
from tritile.tune.suites import SHIPPED, find, parse_shape

H200 = target_device("nvidia-h200")
PROBLEM = QuantizedProblem(16, 4096, 8192, "bfloat16", 4, 128)


@pytest.fixture
def weight():
    ones = torch.ones(40, 130, dtype=torch.float16)
    return tritile.quantize(ones, bits=8, group_size=32, zero_points=True)


def test_bytes_are_those_of_the_tensors(weight):
    problem = QuantizedProblem(3, 40, 130, "float16", 8, 32, True, bias=True)
    assert (problem.words, problem.scales) == (weight.packed.shape, weight.scales.shape)
    assert problem.weight_bytes == weight.nbytes
    assert problem.bytes == weight.nbytes + 2 * (3 * 130 + 3 * 40 + 40)


def test_a_call_poses_its_problem(weight):
    x, out = torch.ones(3, 130, dtype=torch.float16), torch.empty(3, 40, dtype=torch.float16)
    call = quantized_call(x, weight, torch.ones(40), out)
    assert call.problem == QuantizedProblem(3, 40, 130, "float16", 8, 32, True, True, "row", 4)
    assert [t.dtype for t in call.tensors] == [
        torch.float16, torch.int32, torch.float16, torch.int16, torch.float32, torch.float16
    ]  # fmt: skip
    assert quantized_call(x.t().contiguous().t(), weight, None, out).problem.x_layout == "strided"
    one_row = quantized_call(x[:1], weight, None, out[:1])
    assert one_row.problem.x_align == 16  # no row is stepped over


def test_shapes_written_out():
    problem = parse_shape("3x40x130", "linear_quantized", "float16", "int8/64 zeros").problem
    assert problem == QuantizedProblem(3, 40, 130, "float16", 8, 64, True, x_align=4)
    assert parse_shape("3x40x128", "linear_quantized").problem == QuantizedProblem(
        3, 40, 128, "bfloat16", 4, 128
    )
    for text, dtype, layout in (
        ("2x3x40x130", "float16", "int4/128"),
        ("3x40x130", "float32", "int4/128"),
        ("3x40x130", "float16", "int4/48"),
    ):
        with pytest.raises(InvalidValueError, match=r"wanted|takes bfloat16, float16"):
            parse_shape(text, "linear_quantized", dtype, layout)


def test_results_name_their_case(tmp_path):
    case, env = find(["weights"], SHIPPED)[0], dict.fromkeys(results.ENV_FIELDS, "here")
    config = model.pick(case.problem, H200)
    measured = results.Measurement(10.0, 25.0, None, 0.01, 1e-3, 1e-3, None, config, "model")
    line = results.result(case, measured, env)
    assert line["gbps"] == pytest.approx(case.problem.bytes / 1e4, rel=1e-5)
    results.append(tmp_path / "weights.jsonl", [line])
    (again,) = results.read(tmp_path / "weights.jsonl", pytest.fail)
    assert results.case_of(again) == case
    (row,) = summary([again])
    assert (row.layout, row.worst_label, row.geomean) == ("int4/128", "1x4096x4096", 2.5)


def config(m=16, n=64, k=128, split=1, warps=4, stages=4):
    sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 1, "SPLIT_K": split}
    return Config.of(warps, stages, "tile", **sides)


@pytest.mark.parametrize(
    ("config", "problem", "reason"),
    [
        (config(k=64), PROBLEM, "below the 128 columns that are packed together"),
        (config(m=8), PROBLEM, "must be 16 at the least"),
        (config(split=128), PROBLEM, "SPLIT_K = 128 leaves programs without a block"),
        (config(m=256, n=256), PROBLEM, "accumulator and"),
        (config(n=16, warps=8), PROBLEM, "leaves some of 8 warps idle"),
        (config(m=128, n=128, k=256, warps=8, stages=8), PROBLEM, "bytes of shared memory"),
        (config(split=2), replace(PROBLEM, n=2**21), "tiles share their K"),
        (config(m=128, n=256, split=2, warps=8, stages=2), replace(PROBLEM, m=4096), "sum all parts"),
        (config(), replace(PROBLEM, k=2**31), "sizes above"),
    ],
)
def test_illegal_configs(config, problem, reason):
    assert reason in illegal(config, problem, H200)


def test_planned_and_not_explained():
    with tritile.mode("off"):  # whatever the table that ships knows
        plan = tritile.plan(PROBLEM, device=H200)
    assert plan.source == "model"
    assert illegal(plan.config, PROBLEM, H200) is None
    with pytest.raises(UnsupportedError, match="wanted a product or permutation of plain operands"):
        tritile.explain(PROBLEM, device=H200)
