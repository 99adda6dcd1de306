"""README, guides, notebook and examples on a GPU, as they stand: each in a process with an empty store."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
    if re.search(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE)
]
COMMANDS = (
    "doctor",
    "tune 1000x777x333 --layout NT",
    "show",
    "bench 1000x777x333 --layout NT",
    "export --output table.json",
    "clear --yes",
)


def run(folder, *arguments, cwd=None):
    """Run Python in a folder, or in cwd, with a store in the folder."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "TRITILE_CACHE_DIR": str(folder / "store"),
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd or folder, env=environ, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
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
