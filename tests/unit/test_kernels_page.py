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


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package with the page's folder and its one line."""
    base = tmp_path_factory.mktemp("stranger")
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


def ran(copy, code, **variables):
    """What `code` prints where the copy is the package."""
    env = os.environ | {"PYTHONPATH": str(copy), "TRITILE_CACHE_DIR": str(copy / "cache")} | variables
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copy, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_runs(copy):
    ran(copy, "".join(text for kind, _, text in BLOCKS if kind == "run"), TRITON_INTERPRET="1")


def test_all_that_asks_the_registry_knows_the_kernel(copy):
    code = (
        "import tritile\n"
        "from tritile.core.problem import MatmulProblem\n"
        "from tritile.families.registry import digests\n"
        "from tritile.families.space import illegal, legal_configs\n"
        "from tritile.families.naive.family import CONFIGS\n"
        "from tritile.planning import model\n"
        "from tritile.runtime.ahead import compiled_for\n"
        "problem = MatmulProblem(1, 512, 512, 512, 'float16', 'float16')\n"
        "device = tritile.target_device('nvidia-h200')\n"
        "assert len(digests()['matmul/naive']) == 16\n"
        "assert set(legal_configs(problem, device, 'naive')) == set(CONFIGS)\n"
        "assert 'naive' in model.families(problem, device)\n"
        "for m, n, k in ((300, 200, 48), (20, 20, 4), (64, 64, 64), (1, 4096, 32), (512, 512, 512)):\n"
        "    for dtype in ('bfloat16', 'float32'):\n"
        "        assert model.pick(MatmulProblem(1, m, n, k, dtype, dtype), device).family != 'naive'\n"
        "batch = MatmulProblem(2, 8, 8, 8, 'float16', 'float16')\n"
        "assert 'one matrix' in illegal(CONFIGS[0], batch, device)\n"
        "print(compiled_for(problem, CONFIGS[0], device).name)\n"
        "import sys\n"
        "from tritile.__main__ import main\n"
        "config, target = 'naive BLOCK_M=32 BLOCK_K=32', 'nvidia-h200'\n"
        "sys.argv = ['tritile', 'explain', '512', '512', '512', '--config', config, '--target', target]\n"
        "main()"
    )
    compiled, explained = ran(copy, code).split("\n", 1)
    assert compiled == "matmul_naive"
    assert "naive" in explained
