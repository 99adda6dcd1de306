"""Give a shipped table the digests of the kernels' present source, where they still compile to the same code.

    python tuning/restamp.py nvidia-h200 --base <revision>

A table's times count for the source that they were measured with, told by a digest. A change that leaves the
machine code of every config in the table as it was leaves its times true: each config is compiled, without a
GPU, by the checkout and by a copy of the revision that the table was measured with, and the instructions are
compared. Compile with the Triton that the table names. Nothing is written if any differs.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_of(kernel) -> str:
    """A digest of a compiled kernel's instructions and their encodings by cuobjdump."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (re.sub(r"/\*[0-9a-fx]*\*/", "", line).strip() for line in text.splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith("Function"))
    return hashlib.sha256(code.encode()).hexdigest()


def tell(slug: str) -> None:
    """Print, of the tree that this is run in, the code of each entry of a table, and the kernels' digests."""
    from tritile import launch, table
    from tritile.ahead import compiles_for
    from tritile.device import target_device
    from tritile.offline import compiling_for

    device = target_device(slug)
    shipped = table.shipped(device)
    if shipped is None:
        raise SystemExit(f"no table of {slug} is shipped")
    codes = {}
    for number, entry in enumerate(shipped.entries, start=1):
        with compiling_for(device):
            kernels = [compiled() for compiled in compiles_for(entry.problem, entry.config, device)]
        name = f"{entry.problem.op} {entry.problem.label}: {entry.config}"
        codes[name] = " ".join(map(code_of, kernels))
        if number % 50 == 0:
            print(f"{number} of {len(shipped.entries)}", file=sys.stderr)
    print(json.dumps({"codes": codes, "kernels": launch.digests()}))


def told(tree: Path, slug: str) -> dict:
    """What `tell` prints in a tree."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, slug, "--tell"]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=tree, env=environment).stdout
    )


def main() -> None:
    """Compare two trees, and stamp the table of the checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slug", help="the table: nvidia-h200")
    parser.add_argument("--base", help="the revision whose kernels the table was measured with")
    parser.add_argument("--tell", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.tell:
        return tell(wanted.slug)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", base, wanted.base], check=True, cwd=ROOT)
        try:
            before, now = told(base, wanted.slug), told(ROOT, wanted.slug)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], check=True, cwd=ROOT)
    path = ROOT / "tritile" / "tables" / f"{wanted.slug}.json"
    text = path.read_text(encoding="utf-8")
    stamps = json.loads(text)["kernels"]
    if any(before["kernels"].get(name) != digest for name, digest in stamps.items()):
        raise SystemExit(f"the table is not of {wanted.base}: its kernels have other digests")
    differ = [name for name, code in now["codes"].items() if before["codes"].get(name) != code]
    if differ:
        raise SystemExit(f"{len(differ)} of {len(now['codes'])} differ, as {differ[0]}: tune them anew")
    for name, digest in stamps.items():
        text = text.replace(f'"{name}": "{digest}"', f'"{name}": "{now["kernels"][name]}"')
    path.write_text(text, encoding="utf-8")
    print(f"{len(now['codes'])} configs compile to the same code; {path} has the present digests")


if __name__ == "__main__":
    main()
