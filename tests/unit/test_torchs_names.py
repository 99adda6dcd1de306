"""Arguments of torch's operations go by torch's names: calls with keywords carry over."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F

import tritile

A, B, C = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
BATCHES = {1: A.expand(2, 3, 4), 2: B.expand(2, 4, 5)}
# Each operation of torch, all of its arguments by keyword, and the shape of the result.
CALLS = {
    torch.matmul: ({"input": A, "other": B}, (3, 5)),
    torch.mm: ({"input": A, "mat2": B}, (3, 5)),
    torch.bmm: ({"input": BATCHES[1], "mat2": BATCHES[2]}, (2, 3, 5)),
    torch.addmm: ({"input": C, "mat1": A, "mat2": B, "beta": 2, "alpha": 0.5}, (3, 5)),
    torch.baddbmm: ({"input": C, "batch1": BATCHES[1], "batch2": BATCHES[2], "beta": 2}, (2, 3, 5)),
    F.linear: ({"input": A, "weight": B.mT, "bias": B[0]}, (3, 5)),
    torch.transpose: ({"input": A, "dim0": 0, "dim1": 1}, (4, 3)),
    torch.permute: ({"input": BATCHES[1], "dims": (2, 0, 1)}, (4, 2, 3)),
}  # fmt: skip


def ours(function):
    return getattr(tritile, function.__name__)


def parameters(function):
    return inspect.signature(function).parameters


def documented(function):
    """The parameters of a function of torch's, as the first line of its documentation has them."""
    (signature,) = re.findall(rf"^\s*{function.__name__}\((.*)\) -> ", function.__doc__, re.MULTILINE)[:1]
    return parameters(eval(f"lambda {signature}: None"))


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_parameters_as_torch_names(function):
    theirs, mine = documented(function), parameters(ours(function))
    places = [name for name, each in theirs.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    places = [name for name in places if name != "out_dtype"]  # ours is a keyword everywhere
    assert list(mine)[: len(places)] == places
    assert set(theirs) <= set(mine)
    for name, each in theirs.items():
        if each.default is not each.empty:
            assert mine[name].default == each.default
    name = {"mm": "matmul", "bmm": "matmul", "transpose": "permute"}.get(function.__name__, function.__name__)
    schema = getattr(torch.ops.tritile, name).default._schema
    assert {argument.name for argument in schema.arguments} <= set(parameters(getattr(tritile, name)))


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_calls_with_torchs_keywords(function):
    words, shape = CALLS[function]
    wanted = function(**words)
    assert tuple(wanted.shape) == shape
    for out in (None, torch.full(shape, torch.nan)):
        got = ours(function)(**words, out=out)
        torch.testing.assert_close(got, wanted.contiguous(), rtol=1e-6, atol=1e-5)
        assert out is None or got is out
