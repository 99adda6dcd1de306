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
N, K = (4096, 4096) if ON_GPU else (128, 128)
TARGET = "nvidia-h200"  # compiled for where no GPU is here
SERVER = f"""
import torch, tritile
weight = torch.randn({N}, {K}, device="cuda", dtype=torch.bfloat16)
for rows in (1, 7, 77, 777):
    tritile.matmul(torch.randn(rows, {K}, device="cuda", dtype=torch.bfloat16), weight.mT)
print("four numbers of rows ran, and nothing was compiled")
"""


def python(*arguments: str, **environment: str) -> None:
    """Run a process, as a Dockerfile does, and stop where it fails."""
    subprocess.run([sys.executable, *arguments], check=True, env=os.environ | environment)


def main(folder: str) -> None:
    command = ["-m", "tritile", "compile", f"8x{N}x{K}", "--layout", "NT"]
    # On a GPU for any number of rows, which compiles every kernel of the class; elsewhere one shows how.
    command += ["--any-rows"] if ON_GPU else ["--target", TARGET]
    python(*command, TRITON_CACHE_DIR=folder)
    python(
        *command, TRITON_CACHE_DIR=folder, TRITILE_MODE="strict"
    )  # exit status 1 where a kernel is missing

    if ON_GPU:
        return python("-c", SERVER, TRITON_CACHE_DIR=folder, TRITILE_MODE="strict")
    weight = torch.empty(N, K, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, K, device="meta", dtype=torch.bfloat16)
    with tritile.mode("strict"):
        print(tritile.plan(tritile.matmul, x, weight.mT, device=TARGET))
    print("no GPU here: compiled, checked and planned, not run")
    return None


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(str(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(made)
