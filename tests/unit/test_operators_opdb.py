"""What torch's own tests ask of its products, on the CPU."""

import pytest
import torch

from tests.opdb import NAMES, check, samples
from tests.reference import name as of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=of)
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_torchs_own_tests(name, dtype):
    taken = [check(name, sample, dtype) for sample in samples(name, "cpu", dtype)]
    assert taken
    assert all(taken) == (not dtype.is_complex or name in ("matmul", "mm", "bmm", "mv"))
