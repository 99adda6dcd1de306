"""Names with a choice: a type checker knows them, and a call takes just these."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import tritile
from tritile.core.epilogue import ACTIVATIONS, Activation
from tritile.core.problem import PRECISIONS_OF, Precision
from tritile.core.quantized import WeightKind
from tritile.core.settings import MODES, Mode

ROOT = Path(tritile.__file__).parents[1]
# torch is left out: to check its own types takes longer than all the rest.
SETTINGS = "[mypy]\n[mypy-torch.*,triton.*,numpy.*,platformdirs.*]\nfollow_imports = skip\n"
USER = """\
import torch
import tritile


class Net(torch.nn.Linear):  # type: ignore[misc,unused-ignore]
    inner: int


def step(x: torch.Tensor, net: Net) -> torch.Tensor:
    with tritile.mode("tune"), tritile.mode("cached"):
        y = tritile.linear(x, x, activation="gelu", precision="fp16x3")
    with tritile.mode("tuen"):
        y = tritile.linear(y, x, activation="glue")
    same = tritile.nn.convert(net, "int8", group_size=64)
    reveal_type(same)
    weight = tritile.quantize(x, bits=4)
    seconds: float = tritile.tune("matmul", x, x, exhaustive=True).seconds
    ratio: float | None = tritile.bench(tritile.matmul, x, x).ratio
    source: str = tritile.plan("matmul", x, x).source
    print(net.inner, seconds, ratio, source, tritile.errors.NotTunedError)
    return tritile.linear(y, weight)
"""


@pytest.mark.slow
def test_a_type_checker_finds_misspelt_names_in_a_users_file_and_nothing_else(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [
        *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"),
        *(f"--cache-dir={tmp_path / 'cache'}", f"--config-file={tmp_path / 'mypy.ini'}", "user.py"),
    ]
    environment = {"MYPYPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    places = {USER[: USER.index(text)].count("\n") + 1: text for text in ("tuen", "glue")}
    assert [int(line.split(":")[1]) for line in lines] == list(places), done.stdout
    for line, text in zip(lines, places.values(), strict=True):
        assert f"'{text}'" in line
    assert 'Revealed type is "tritile.nn.convert.Conversion"' in done.stdout


def test_what_a_call_takes_is_what_its_type_says():
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


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant():
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
