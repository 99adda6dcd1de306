"""The notebook in examples/: it runs as on a machine without a GPU, and stores the outputs of such a run.

After a change of the notebook, or of what it prints, `python tests/unit/test_notebook.py` writes the outputs
anew.
"""

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
import triton
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
LIMIT_S = 120  # for each cell
PINNED = re.search(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
# What a cell prints, by its id.
CLAIMS = {
    "imports": "kernels are interpreted",
    "product": r"\(127, 93\): agrees with torch",
    "plan": r"Plan for 127x93x65 NN float16 on NVIDIA H200: t.*\n  config +\w+ BLOCK_",
    "explain": r"bytes with these tiles .*bound by ",
    "summary": r"programs .* us predicted; \w+ alone needs .*\n.* \d+ times fewer bytes",
    "kernels": r"def matmul_naive.*def matmul_tiles",
    "rungs": r"naive .* 4398.3 GB .*shared tiles .* 137.7 GB .*tensor cores .* 17.3 GB .*tritile.matmul ",
    "call": r"agrees with the reference; ran with BLOCK: \d+",
    "lives": r"source  interpreter: the first config",
    "check": r"12 right, 0 wrong, 0 failed\nchecked at .*make\(8, 512\) and .*make\(7, 511\)",
}
# Runs after the notebook: the kernel of its cell is sent to another process, as measuring on a GPU does.
SENT = """
import tempfile
from pathlib import Path

from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.tuner.decorated import TunableKernel
from tritile.tuner.measure.shipping import pack
from tritile.tuner.measure.workers import WorkerPool


def checked(subject, config):
    return os.getpid(), subject.harness(1).check(config, None)


call = rms_norm.call(args, {"grid": grid, "warmup": False}, HOST)
with tempfile.TemporaryDirectory() as folder, WorkerPool(1) as workers:
    shipment = pack(call, Path(folder), 2**30, host_too=True)
    subject = TunableKernel(call.problem, call.device, call.source, shipment)
    process, error = workers.submit(checked, subject, Config.from_triton(rms_norm.best_config)).result()
print(process != os.getpid(), error < 1e-2)
"""


def executed(folder: Path, *more: str) -> NotebookNode:
    """Run the notebook and `more` cells in a Jupyter kernel that sees no GPU; return them with outputs."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells += map(nbformat.v4.new_code_cell, more)
    outside = ("TRITILE_", "TRITON_", "JUPYTER_", "IPYTHON")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "TRITILE_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder),
    }
    client = NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder))  # of the file that names the kernel's ports
        client.execute(env=env)
    return notebook


def printed(notebook: NotebookNode, cell: str) -> str:
    (outputs,) = (each.outputs for each in notebook.cells if each.id == cell)
    return "".join(each.text if each.output_type == "stream" else each.data["text/plain"] for each in outputs)


def outputs_of(notebook: NotebookNode) -> dict[str, list[NotebookNode]]:
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    return executed(tmp_path_factory.mktemp("notebook"), SENT)


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_notebook_prints_claims(run):
    for cell, pattern in CLAIMS.items():
        assert re.search(pattern, printed(run, cell), re.DOTALL), cell
    (shown,) = (output for cell in run.cells if cell.id == "picture" for output in cell.outputs)
    assert shown.data["image/svg+xml"].startswith("<svg")
    assert "hatched: past the edge" in shown.data["image/svg+xml"]


def test_cell_kernel_in_other_process(run):
    (output,) = run.cells[-1].outputs
    assert output.text == "True True\n"


@pytest.mark.skipif(triton.__version__ != PINNED, reason=f"stores what runs with triton {PINNED} print")
def test_stored_outputs_of_a_run(run, stored):
    found = outputs_of(run)
    del found[run.cells[-1].id]
    assert outputs_of(stored) == found, "python tests/unit/test_notebook.py writes them anew"


def test_outputs_name_nothing_of_a_machine(stored):
    assert not re.search(
        rf"{re.escape(str(ROOT))}|/tmp/|/home/|/root/|0x[0-9a-f]{{6}}", str(outputs_of(stored))
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
    notebook.metadata.language_info = {"name": "python"}  # without the version that ran
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
