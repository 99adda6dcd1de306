"""Run each script of examples/ at its small size, in this process, and look at what it says."""

import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tritile
from tests.commands import run
from tritile.lab import warm

ROOT = Path(tritile.__file__).parents[1]
SAID = {
    "container": "compiled, checked and planned",
    "llama": "0 of 11 linear layers exchanged",
    "mixture_of_experts": "relative error",
    "quantized_layer": "24768 bytes became 6720",
    "rms_norm": "5x300 runs with BLOCK",
    "server": "4 of 4 requests by tritile",
    "two_gpus": "skipped: needs two GPUs, 0 here",
}


def test_every_example_is_short_and_run():
    scripts = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == SAID.keys()
    assert all(len(path.read_text().splitlines()) <= 80 for path in scripts.values())


class Thread(ThreadPoolExecutor):
    """Stands for the processes of a Workers, which import torch first."""

    def __init__(self, jobs):
        super().__init__(1)

    def submit(self, function, *arguments, limit_s):
        return super().submit(function, *arguments)


def _here(run_process):
    """Return `subprocess.run`, but for `tritile` itself, which this process runs: it has torch already."""

    def ran(command, **words):
        if command[:3] != [sys.executable, "-m", "tritile"]:
            return run_process(command, **words)
        done = run(*command[3:], env=words["env"])
        assert done.exit_code == 0, done.output
        return done

    return ran


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs at real size on a GPU: start the scripts by hand")
@pytest.mark.parametrize("name", [name for name in SAID if name != "rms_norm"])  # see test_own_kernels
def test_it_runs_without_a_gpu(name, capsys, monkeypatch):
    script = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setattr("subprocess.run", _here(subprocess.run))
    monkeypatch.setattr(warm, "Workers", Thread)
    runpy.run_path(str(script), run_name="__main__")
    assert SAID[name] in capsys.readouterr().out
