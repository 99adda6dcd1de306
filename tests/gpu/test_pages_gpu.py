"""README, guides, notebook, examples and scripts on a GPU: each in a process with an empty store."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tritile.core.device import current_gpu

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
    if re.search(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE)
]
# Commands that guides have their readers type, but for those that take minutes.
TYPED = {
    path.stem: re.findall(
        r"^tritile ((?:tune \d|doctor|bench|show|explain|compile)[^#\n]*)", path.read_text(), re.MULTILINE
    )
    for path in sorted((ROOT / "docs" / "guides").glob("*.md"))
}
# Scripts of tuning/, as small as they go, and what they print.
SCRIPTS = (
    ("autotune.py --quick --budget 5", "bench.py"),  # with status 1 for problems that are left
    ("bench.py --suite quick --only 1024x1024x1024 --output lines", "1024x1024x1024"),
    ("compare_autotune.py --only softmax\\ 4x64", "tritile_host_us"),
    ("kinds.py kinds.jsonl --sizes 1 --kinds float64\\ ieee", "torch/tritile"),
    ("ladder.py 512", "naive"),
    ("models.py --models gpt2 --what forward --turns 1", "ratio"),
    ("permutations.py permute_8 --sweeps sweeps --sizes 2 --jobs 4 --seconds 1000", "2 sizes in"),
    ("rows.py --count 3 --size 256", "second_ms"),
    ("searches.py --count 1", "regrets"),
    ("warm_calls.py --only key --batches 2", "tritile, us"),
)
COMMANDS = (
    "doctor",
    "tune 1000x777x333 --layout NT",
    "show",
    "bench 1000x777x333 --layout NT",
    "export --output table.json",
    "clear --yes",
)


def run(folder, *arguments, cwd=None, most=0):
    """Run Python in a folder, or in cwd, with a store in the folder; return what it prints."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "TRITILE_CACHE_DIR": str(folder / "store"),
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd or folder, env=environ, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode in range(most + 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(page, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    script = tmp_path / "snippets.py"  # a kernel is read from a file
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    run(tmp_path, script)


def test_the_notebook_runs(tmp_path):
    """Run its cells as a script, without the picture, which needs IPython."""
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "tour.py"
    script.write_text(code.replace("from IPython.display import SVG", "SVG = str"))
    out = run(tmp_path, script, cwd=ROOT / "examples")  # it imports from ../tuning
    assert "kernels are compiled" in out
    assert "source  exact" in out  # the kernel was measured


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    run(tmp_path, path)


def test_commands_measure_list_export_and_clear(tmp_path):
    for command in COMMANDS:
        run(tmp_path, "-m", "tritile", *command.split())
    assert json.loads((tmp_path / "table.json").read_text())["entries"]


@pytest.mark.parametrize("page", [page for page, found in TYPED.items() if found])
def test_the_commands_of_a_guide_run(page, tmp_path):
    for command in TYPED[page]:
        run(tmp_path, "-m", "tritile", *shlex.split(command))


@pytest.mark.slow
@pytest.mark.parametrize(("line", "printed"), SCRIPTS, ids=[line.partition(".")[0] for line, _ in SCRIPTS])
def test_a_script_runs(line, printed, tmp_path):
    """In a copy, for some write beside themselves."""
    if line.startswith("models"):
        pytest.importorskip("transformers")
    left_out = shutil.ignore_patterns("results", "sweeps", "trials", "__pycache__")
    folder = shutil.copytree(ROOT / "tuning", tmp_path / "tuning", ignore=left_out)
    (folder / "results" / current_gpu().slug).mkdir(parents=True)
    (tmp_path / "sweeps").mkdir()
    script, *arguments = shlex.split(line)
    assert printed in run(tmp_path, folder / script, *arguments, most="--budget" in arguments)
