"""docs/kernels.md, followed as it stands in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tritile

ROOT = Path(tritile.__file__).parents[1]
PAGE = (ROOT / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"^```(?:python|text) (\w+)=?(\S*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with the page's folder and its one line."""
    base = tmp_path / "stranger"
    shutil.copytree(ROOT / "tritile", base / "tritile", ignore=shutil.ignore_patterns("__pycache__"))
    written = []
    for kind, file, text in BLOCKS:
        if kind == "file":
            (base / file).parent.mkdir(exist_ok=True)
            (base / file).write_text(text)
            written.append(file)
        elif kind == "line":
            registry = base / file
            lines = registry.read_text()
            assert text.strip() not in lines
            lines = lines.replace("\n)\nFAMILIES", f"\n{text})\nFAMILIES", 1)
            lines = lines.replace(
                "from tritile.families.permute", "from tritile.families.naive import family as naive\n"
                "from tritile.families.permute", 1
            )  # fmt: skip
            registry.write_text(lines)
    assert {Path(file).parent.as_posix() for file in written} == {"tritile/families/naive"}
    return base


# The page's tests, interpreted, in a fork; meanwhile what all that asks the registry knows of the kernel.
CODE = """
import os, sys, warnings
import torch  # once, in seconds
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os.environ["TRITON_INTERPRET"] = "1"
    exec(open("page.py").read(), {})
    os._exit(0)
import tritile
from tritile.__main__ import main
from tritile.core.problem import MatmulProblem
from tritile.families.registry import digests
from tritile.families.space import illegal, legal_configs
from tritile.families.naive.family import CONFIGS
from tritile.planning import model
problem = MatmulProblem(1, 512, 512, 512, "float16", "float16")
device = tritile.target_device("nvidia-h200")
assert len(digests()["matmul/naive"]) == 16
assert set(legal_configs(problem, device, "naive")) == set(CONFIGS)
assert "naive" in model.families(problem, device)
for m, n, k in ((300, 200, 48), (20, 20, 4), (1, 4096, 32), (512, 512, 512)):
    assert model.pick(MatmulProblem(1, m, n, k, "float32", "float32"), device).family != "naive"
batch = MatmulProblem(2, 8, 8, 8, "float16", "float16")
assert "one matrix" in illegal(CONFIGS[0], batch, device)
assert os.waitpid(child, 0)[1] == 0
config = "naive BLOCK_M=32 BLOCK_K=32"
sys.argv = ["tritile", "explain", "512", "512", "512", "--config", config, "--target", "nvidia-h200"]
main()
"""


def test_the_page_runs_and_all_that_asks_the_registry_knows_the_kernel(copy):
    (copy / "page.py").write_text("".join(text for kind, _, text in BLOCKS if kind == "run"))
    env = os.environ | {"PYTHONPATH": str(copy), "TRITILE_CACHE_DIR": str(copy / "cache")}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copy, env=env)
    assert done.returncode == 0, done.stderr
    assert "naive BLOCK_K=32 BLOCK_M=32" in done.stdout
    assert " a thread" in done.stdout  # its registers: it compiled
