"""Names with a choice: a call takes just those that its type has."""

from typing import get_args

import pytest
import torch

import tritile
from tritile.core.epilogue import ACTIVATIONS, Activation
from tritile.core.problem import PRECISIONS_OF, Precision
from tritile.core.quantized import WeightKind
from tritile.core.settings import MODES, Mode


def test_calls_take_what_types_say():
    x = torch.zeros(2, 2)
    assert (get_args(Activation), get_args(Mode)) == (ACTIVATIONS, MODES)
    assert set(get_args(Precision)) == {name for names in PRECISIONS_OF.values() for name in names}
    for wanted, call in (
        (ACTIVATIONS, lambda: tritile.linear(x, x, activation="glue")),
        (MODES, lambda: tritile.mode("tuen").__enter__()),
        (PRECISIONS_OF["float32"], lambda: tritile.matmul(x, x, precision="exact")),
        (get_args(WeightKind), lambda: tritile.nn.convert(torch.nn.Linear(2, 2), "int2")),
    ):
        with pytest.raises(tritile.errors.InvalidValueError, match=f"expected one of {', '.join(wanted)}"):
            call()


def test_misspelt_names_get_hints():
    x, layer = torch.zeros(2, 2), torch.nn.Linear(2, 2)
    product = tritile.core.problem.MatmulProblem(1, 64, 64, 64, "bfloat16", "bfloat16")
    for meant, call in (
        ("gelu_tanh", lambda: tritile.linear(x, x, activation="gelu-tanh")),
        ("tune", lambda: tritile.mode("tuen")),
        ("triton,aten", lambda: tritile.mode(backends="triton+aten")),
        ("fp16x3", lambda: tritile.matmul(x, x, precision="fp16")),
        ("int8", lambda: tritile.nn.convert(layer, "in8")),
        ("b200", lambda: tritile.plan("matmul", x, x, device="b2000")),
        ("linear", lambda: tritile.plan("liner", x, x)),
        ("BLOCK_M", lambda: tritile.explain(product, device="h200", config="tile BLOK_M=64")),
        ("tile", lambda: tritile.explain(product, device="h200", config="tyle")),
    ):
        with pytest.raises(
            tritile.errors.InvalidValueError, match=rf"\(did you mean '{meant}'\?\): expected"
        ):
            call()
    for other in ("sine", 7, None):
        assert tritile.errors.did_you_mean(other, ACTIVATIONS) == ""


def test_operators_of_torch_take_plain_strings():
    schema = torch.ops.tritile.linear.default._schema
    assert [
        str(argument.type) for argument in schema.arguments if argument.name in ("activation", "precision")
    ]
    assert "Literal" not in str(schema)
