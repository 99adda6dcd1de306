"""The benchmark of warm calls on a GPU that is not there: what it calls and writes. No time is looked at."""

import pytest

import warm_calls
from tests.mock_gpu import mock_gpu
from tritile.tuner.autotuner import Autotuner


def made(name, side):
    """Return a kind's call, and the tuners under which it put its kernels."""
    tuners = []

    def decorate(*args, **more):
        decorator = warm_calls.decorated(side, *args, **more)
        return lambda kernel: tuners.append(decorator(kernel)) or tuners[-1]

    return warm_calls.KINDS[name](decorate), tuners


@pytest.mark.parametrize("name", sorted({*warm_calls.KINDS} - warm_calls.ON_GPU_ALONE))
def test_both_sides_run_the_same_configs(name, monkeypatch):
    monkeypatch.setattr(warm_calls, "DEVICE", "meta")
    monkeypatch.setenv("TRITILE_MODE", "tune")
    chosen = {}
    with mock_gpu():
        for side in warm_calls.SIDES:
            call, tuners = made(name, side)
            assert {isinstance(tuner, Autotuner) for tuner in tuners} == {side == "tritile"}
            if side == "triton" and name == "key: descriptor":
                with pytest.raises(TypeError, match="unhashable"):
                    call()
                continue
            for _ in range(3):
                call()
            chosen[side] = [str(tuner.best_config) for tuner in tuners]
    assert chosen["tritile"]
    assert chosen.get("triton", chosen["tritile"]) == chosen["tritile"]
