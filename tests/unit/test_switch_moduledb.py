"""What torch's own tests ask of its modules, with the switch on, on the CPU."""

import pytest
import torch

import tritile
from tests.moduledb import check, samples
from tests.reference import name as of
from tritile.in_torch import routes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
# Attention's samples are all choices of six options, in training and then not: the first has each option that
# the last has not, and these two are what the interpreter has time for.
EVERY = {"Linear": 1, "MultiheadAttention": 127}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=of)
@pytest.mark.parametrize("name", EVERY)
def test_samples_of_torchs_own_tests(name, dtype):
    chosen = list(samples(name, "cpu", dtype))[:: EVERY[name]]
    products = [
        check(*given, dtype, "cpu", tritile.use_in_torch("always", _keys=("CPU",))) for given in chosen
    ]
    assert len(products) > 1
    assert any(products)


def test_a_product_that_is_a_thousandth_off_is_seen(monkeypatch):
    original = routes._interpreted
    monkeypatch.setattr(routes, "_interpreted", lambda *given: original(*given) * 1.001)
    module, sample = next(samples("Linear", "cpu", torch.float32))
    with pytest.raises(AssertionError, match=r"with the switch, output 0: \d+ elements off"):
        check(module, sample, torch.float32, "cpu", tritile.use_in_torch("always", _keys=("CPU",)))
