"""Give the shipped table and trials the digests of the kernels' present source, where their times still hold.

    python tuning/restamp.py nvidia-h200 --base <revision> [--as-fast matmul/descriptor ...]

A time counts for the source that was measured, told by a digest. `--base` is the revision whose digests the
table has. Each kernel of the table takes the first of these ways to its present digest:
- its source there is the same by the present definition of the digest;
- it is named after `--as-fast`: its code differs, and a measurement beside the base showed the same speed;
- each of its configs in the table compiles, without a GPU, to the same instructions in both trees. Compile
  with the Triton that the table names.
Nothing is written if a kernel takes none of them. Trials of `tuning/trials` follow their kernels.
"""

import argparse
import contextlib
import gzip
import hashlib
import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType

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


def codes(slug: str, names: Collection[str]) -> dict[str, str]:
    """The code of each entry of a table that is of these kernels, in the tree that this is run in."""
    from tritile.core.device import target_device
    from tritile.planning import gpu_tables
    from tritile.runtime.ahead import compiles_for
    from tritile.runtime.offline import compiling_for

    device = target_device(slug)
    entries = [e for shipped in gpu_tables.shipped(device) for e in shipped.entries if name_of(e) in names]
    found = {}
    for number, entry in enumerate(entries, start=1):
        with compiling_for(device):
            kernels = [compiled() for compiled in compiles_for(entry.problem, entry.config, device)]
        name = f"{entry.problem.op} {entry.problem.label}: {entry.config}"
        found[name] = " ".join(map(code_of, kernels))
        if number % 50 == 0:
            print(f"{number} of {len(entries)}", file=sys.stderr)
    return found


def name_of(entry) -> str:
    """What a table calls the kernel of an entry."""
    return f"{entry.problem.op}/{entry.config.family}"


def _present(name: str) -> ModuleType:
    """Load a module of this checkout's core by its file."""
    spec = importlib.util.spec_from_file_location(f"present_{name}", ROOT / "tritile" / "core" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources() -> dict[str, str]:
    """The digest of each kernel of the tree that this is run in, as this checkout defines digests."""
    from tritile.families.registry import FAMILIES

    sys.modules.setdefault("tritile.core.of_triton", _present("of_triton"))  # which another tree may lack
    present = _present("source")
    return {
        f"{op}/{name}": present.source_hash(family.kernel, *family.also)
        for op, families in FAMILIES.items()
        for name, family in families.items()
    }


def tell(slug: str, names: Collection[str]) -> None:
    """Print what a tree stamps tables with, its digests as defined here, and the code of these kernels."""
    from tritile.families.registry import digests

    told = {"stamps": digests(), "sources": sources(), "codes": codes(slug, names) if names else {}}
    print(json.dumps(told))


def told(tree: Path, slug: str, names: Collection[str]) -> dict:
    """What `tell` prints in a tree."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, slug, "--tell", *names]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=tree, env=environment).stdout
    )


def renamed(slug: str, stamps: Mapping[str, str], base: Path, as_fast: Collection[str]) -> dict[str, str]:
    """The present digest of each kernel in a table, by name. Exits where a kernel's times no longer hold."""
    before, now = told(base, slug, []), told(ROOT, slug, [])
    if any(before["stamps"].get(name) != digest for name, digest in stamps.items()):
        raise SystemExit("the table is not of the base: its kernels have other digests there")
    changed = [name for name in stamps if before["sources"][name] != now["sources"].get(name)]
    asked = [name for name in changed if name not in as_fast]
    if asked:
        old, new = (told(tree, slug, asked)["codes"] for tree in (base, ROOT))
        differ = [name for name, code in new.items() if old.get(name) != code]
        if differ:
            raise SystemExit(f"{len(differ)} of {len(new)} differ, as {differ[0]}: tune them anew")
        print(f"{len(new)} configs of {', '.join(asked)} compile to the same code")
    return {name: now["stamps"][name] for name in stamps}


def restamp_trials(path: Path, digests: Mapping[str, str]) -> int:
    """Replace digests in a compressed store; how many environments had one that is replaced."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "store.sqlite3"
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        with contextlib.closing(sqlite3.connect(plain)) as connection, connection:
            rows = connection.execute("SELECT id, kernel FROM environments").fetchall()
            moves = [(digests[old], row) for row, old in rows if digests.get(old, old) != old]
            connection.executemany("UPDATE environments SET kernel = ? WHERE id = ?", moves)
        if moves:
            path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    return len(moves)


def main() -> None:
    """Compare two trees, and stamp the table and the trials of the checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slug", help="the table: nvidia-h200")
    parser.add_argument("--base", help="the revision whose digests the table has")
    parser.add_argument("--as-fast", nargs="+", default=[], help="kernels that were measured to be as fast")
    parser.add_argument("--tell", nargs="*", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.tell is not None:
        return tell(wanted.slug, wanted.tell)
    path = ROOT / "tritile" / "tables" / f"{wanted.slug}.json"
    text = path.read_text(encoding="utf-8")
    stamps = json.loads(text)["kernels"]
    if unknown := set(wanted.as_fast) - set(stamps):
        raise SystemExit(f"the table has no kernel {', '.join(sorted(unknown))}: it has {', '.join(stamps)}")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", base, wanted.base], check=True, cwd=ROOT)
        try:
            present = renamed(wanted.slug, stamps, base, wanted.as_fast)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], check=True, cwd=ROOT)
    for name, digest in stamps.items():
        text = text.replace(f'"{name}": "{digest}"', f'"{name}": "{present[name]}"')
    path.write_text(text, encoding="utf-8")
    print(f"{path} has the present digests")
    digests = {digest: present[name] for name, digest in stamps.items()}
    for store in sorted((ROOT / "tuning" / "trials").glob(f"{wanted.slug}-*.sqlite3.gz")):
        print(f"{store}: {restamp_trials(store, digests)} environments restamped")


if __name__ == "__main__":
    main()
