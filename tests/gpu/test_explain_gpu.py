"""Explanations on a GPU: what tuning measured, compared with what is predicted and with the roof."""

import pytest

import tritile
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem

pytestmark = [pytest.mark.gpu, pytest.mark.serial]


@pytest.mark.parametrize(
    "problem",
    [MatmulProblem(1, 1024, 1024, 1024, "float16", "float16"), PermuteProblem.transposed(1, 4096, 4099, 4)],
    ids=str,
)
def test_tuned_is_explained_with_times(problem):
    tuned = tritile.tune(problem, force=True)
    found = tritile.explain(problem)
    assert (found.config, found.source) == (tuned.config, "exact")
    assert 0.2 < found.measured_us / found.predicted_us < 5
    assert found.measured_us > 0.9 * found.roof_us
    assert any(other.measured_us for other in found.alternatives)
