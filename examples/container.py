"""Compile ahead, prove it complete, run where nothing may compile: python examples/container.py [FOLDER]

The first two steps need no GPU: the build of a container's image does them. The last step is what the
container does. Without a GPU it plans for the target in mode "strict" and launches nothing.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import tritile

ON_GPU = torch.cuda.is_available()
WEIGHT, ROWS = ("4096x4096", 8192) if ON_GPU else ("128x128", 8)
TARGET = "nvidia-h200"  # compiled for where no GPU is here
SERVER = """
import torch, tritile
weight = torch.randn({n}, {k}, device="cuda", dtype=torch.bfloat16)
for rows in (1, 7, 77, 777):
    tritile.matmul(torch.randn(rows, {k}, device="cuda", dtype=torch.bfloat16), weight.mT)
print("four numbers of rows ran, and nothing was compiled")
"""


def tritile_command(*arguments: str) -> None:
    """Run `tritile`, as a Dockerfile does, and stop where it fails."""
    subprocess.run([sys.executable, "-m", "tritile", *arguments], check=True)


def main(folder: str) -> None:
    what = ["--weight", WEIGHT, "--layout", "NT", "--rows", str(ROWS)]
    if not ON_GPU:
        what += ["--target", TARGET]
    tritile_command("compile", *what, "--output", folder)
    tritile_command("compile", *what, "--check", folder)  # exit status 1 where a kernel is missing

    n, k = map(int, WEIGHT.split("x"))
    if ON_GPU:
        env = os.environ | {"TRITON_CACHE_DIR": folder, "TRITILE_MODE": "strict"}
        subprocess.run([sys.executable, "-c", SERVER.format(n=n, k=k)], check=True, env=env)
        return
    weight = torch.empty(n, k, device="meta", dtype=torch.bfloat16)
    x = torch.empty(ROWS, k, device="meta", dtype=torch.bfloat16)
    with tritile.mode("strict"):
        print(tritile.plan(tritile.matmul, x, weight.mT, device=TARGET))
    print("no GPU here: compiled, checked and planned, not run")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(str(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(made)
