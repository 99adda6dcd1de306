"""What torch's own tests ask of its modules, with the switch on, on a GPU."""

import pytest
import torch

import tritile
from tests.moduledb import NAMES, check, samples
from tests.reference import name as of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=of)
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_torchs_own_tests(name, dtype):
    products = [
        check(*given, dtype, "cuda", tritile.use_in_torch("always")) for given in samples(name, "cuda", dtype)
    ]
    assert len(products) > 1
    assert any(products)
