"""What is run under compute-sanitizer: every case is a call with a config of its family."""

import pytest

from tests.gpu import sanitize
from tritile.device import target_device
from tritile.families import FAMILIES
from tritile.work import work_of

HOPPER = target_device("nvidia-h200")


@pytest.mark.parametrize("name", sanitize.CASES)
def test_every_case_has_a_config(name):
    case = sanitize.CASES[name]
    call = case.call("cpu")
    config = sanitize.config_of(case, call, HOPPER)
    steps = [step.kernel.__name__ for step in work_of(call, config, HOPPER.processors, True).steps]
    assert config.family == case.family
    assert ("repack" in steps) == (name == "repack")


def test_every_family_has_a_case():
    ran = {(case.call("cpu").op, case.family) for case in sanitize.CASES.values()}
    assert ran == {(op, family) for op, families in FAMILIES.items() for family in families}
