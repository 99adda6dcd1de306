"""The benchmark of warm calls on a GPU that is not there: what it calls and writes. No time is looked at."""

import json

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


def test_a_whole_run(monkeypatch, tmp_path, capsys):
    """Lines are appended to a file; triton's figures are null where it does not take the key."""
    path = tmp_path / "lines.jsonl"
    path.write_text("{}\n")
    monkeypatch.setattr(warm_calls, "DEVICE", "cuda")
    monkeypatch.setattr(warm_calls, "host_us", lambda *calls, batches: [2.0, 3.0][: len(calls)])
    monkeypatch.setattr("sys.argv", ["warm_calls.py", "--simulated", "--only", "or", "--output", str(path)])
    assert warm_calls.main() == 0
    _, *lines = map(json.loads, path.read_text().splitlines())
    found = {line["kind"]: (line["tritile_us"], line["triton_us"], line["ratio"]) for line in lines}
    assert found["host descriptors"] == (2.0, 3.0, 1.5)
    assert found["key: descriptor"] == (2.0, None, None)
    assert "custom operator" not in found
    assert {line["gpu"] for line in lines} == {"simulated NVIDIA H100 80GB HBM3"}
    assert lines[0]["triton"]
    assert capsys.readouterr().out.splitlines()[-len(lines) - 1].split() == [
        "kind", "tritile,", "us", "triton,", "us", "ratio",
    ]  # fmt: skip
