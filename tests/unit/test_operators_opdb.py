"""What torch's own tests ask of its products, on the CPU."""

import pytest
import torch

from tests.opdb import NAMES, check, samples
from tests.reference import name as of

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in NAMES for dtype in (torch.float32, torch.complex64)),
        *((name, dtype) for name in ("mm", "addmm") for dtype in (torch.float64, torch.complex128)),
    ],
    ids=lambda given: given if isinstance(given, str) else of(given),
)
def test_samples_of_torchs_own_tests(name, dtype):
    cases = list(samples(name, "cpu", dtype))
    assert cases
    if dtype.is_complex and name in ("addmm", "baddbmm"):
        assert any(isinstance(case.kwargs.get("alpha"), complex) for case in cases)
    for case in cases:
        check(name, case, dtype)
