"""Run once per GPU: tune every suite, export the table, and show tritile against torch.

    python tuning/autotune.py            # every suite; goes on where it stopped
    python tuning/autotune.py --quick    # suite quick alone, a first look: takes some minutes

Without a GPU nothing is measured. It explains what a ragged product would run on an H200, has Triton's
interpreter run the kernels of a product and a transposition, checked against torch, and ends with what calls
of suite quick would run on an H200, and how long that takes.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

import tritile
from tritile.core import device
from tritile.tune.suites import SHIPPED

HERE = Path(__file__).parent
TABLES = HERE.parent / "tritile" / "tables"


def run(*arguments: str, of: tuple[str, ...] = ("-m", "tritile")) -> int:
    """One command of tritile's, or a script, its words shown first; its exit status."""
    print(f"$ python {' '.join((*of, *arguments))}", flush=True)
    process = subprocess.Popen([sys.executable, *of, *arguments])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the command was told too, and stops when it has kept what it measured


def suite_names(quick: bool) -> list[str]:
    """The suites to tune: "quick" alone, or every one but it."""
    names = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    return ["quick"] if quick else [name for name in names if name != "quick"]


def tune_gpu(gpu: device.Device, quick: bool, budget: float | None, bench: bool) -> int:
    """Tune on the GPU that is here, export its table, measure against torch."""
    suites = [word for name in suite_names(quick) for word in ("--suite", name)]
    limit = ["--budget", str(budget)] if budget is not None else []
    status = run("tune", *suites, *limit)
    if status < 0 or status > 1:
        return status
    if not quick:
        status |= run("export", "--output", str(TABLES / f"{gpu.slug}.json"))
    if bench or quick:
        results = [] if quick else ["--output", str(HERE / "results" / gpu.slug)]
        status |= run(*suites, *results, of=(str(HERE / "bench.py"),))
    return status


def demonstrate() -> int:
    """What an H200 would run, and a product and a transposition of odd size in the interpreter, checked."""
    print("There is no GPU here. A ragged product, as an H200 would run it:")
    status = run("explain", "4095x4097x4093", "--target", "h200")
    print("Triton's interpreter runs two kernels, and torch checks them:", flush=True)
    interpreting = os.environ | {"TRITON_INTERPRET": "1"}  # read as Triton is imported
    status = status or subprocess.run([sys.executable, __file__, "--interpret"], env=interpreting).returncode
    print("What calls of suite quick would run on an H200, and how long that takes:", flush=True)
    status = status or run("tune", "--suite", "quick", "--target", "h200")
    print("If this machine has a GPU, `tritile doctor` says what keeps torch from using it.", flush=True)
    return status


def interpret() -> int:
    """Multiply and transpose by the kernels, where TRITON_INTERPRET is set."""
    a, b = torch.randn(131, 67, dtype=torch.float16), torch.randn(67, 93, dtype=torch.float16)
    reference = a.double() @ b.double()
    error = float((tritile.matmul(a, b).double() - reference).norm() / reference.norm())
    print(f"tritile.matmul of {tuple(a.shape)} by {tuple(b.shape)} float16: relative error {error:.2e}")
    x = torch.randn(3, 127, 65, dtype=torch.complex64)
    same = torch.equal(tritile.transpose(x), x.mT)
    print(f"tritile.transpose of {tuple(x.shape)} complex64: {'equal' if same else 'DIFFERENT'}")
    return 0 if same and error < 1e-3 else 1


def main() -> int:
    """Tune what is here; the exit status is 0 where all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the quick suite only")
    parser.add_argument("--budget", type=float, help="seconds to spend on tuning at the most")
    parser.add_argument("--bench", action="store_true", help="after every suite, measure against torch too")
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.interpret:
        return interpret()
    gpu = device.current_gpu()
    if gpu is not None:
        return tune_gpu(gpu, given.quick, given.budget, given.bench)
    return demonstrate()


if __name__ == "__main__":
    sys.exit(main())
