"""Plant faults that tests have to catch, one at a time, in a copy of the tree.

    python tests/plant.py --list
    python tests/plant.py NAME ...      plant these of tests/faults.json and run the tests that they name
    python tests/plant.py --all         each one; those that only a GPU shows are skipped where there is none

Exit status 1 if a fault is not caught: its tests pass, or do not run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def faults() -> dict[str, dict[str, Any]]:
    """tests/faults.json by name: fault, file, old, new, tests, and gpu where none else shows it."""
    return {entry["name"]: entry for entry in json.loads((ROOT / "tests/faults.json").read_text())}


def planted(entry: dict[str, Any], root: Path = ROOT) -> str:
    """The file's text with the fault in it. Raises ValueError unless what it replaces is there just once."""
    text = (root / entry["file"]).read_text()
    if (times := text.count(entry["old"])) != 1:
        raise ValueError(f"{entry['name']}: {entry['file']} has what it replaces {times} times")
    return text.replace(entry["old"], entry["new"])


def caught(entry: dict[str, Any]) -> tuple[bool, str]:
    """Whether the tests of an entry fail with the fault, and how they ended."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, Path(folder, name))
        Path(folder, entry["file"]).write_text(planted(entry))
        import triton

        kept = {"TRITON_CACHE_DIR": str(ROOT / ".triton" / triton.__version__)}  # most kernels are as ever
        environment = kept | os.environ | {"PYTHONPATH": folder}
        if all(
            "pytest.mark.interpreted" in (ROOT / test.partition("::")[0]).read_text()
            for test in entry["tests"]
        ):
            environment["TRITON_INTERPRET"] = "1"  # see tests/conftest.py
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *entry["tests"]]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    last = (ran.stdout.strip() or ran.stderr.strip() or "no output").splitlines()[-1]
    return ran.returncode == 1, last  # 1: tests failed; 2 and above: they did not run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list the faults, and end")
    parser.add_argument("--all", action="store_true", help="plant each one")
    given, known = parser.parse_args(), faults()
    if given.list:
        for name, entry in known.items():
            print(f"{name:24}{'GPU  ' if entry.get('gpu') else '     '}{entry['fault']} ({entry['file']})")
        return
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"unknown fault {', '.join(unknown)}: see --list")
    if not given.names and not given.all:
        parser.error("expected names of faults, --all or --list")
    import torch

    missed = 0
    for name in known if given.all else given.names:
        if known[name].get("gpu") and not torch.cuda.is_available():
            print(f"{name}: skipped, needs a GPU", flush=True)
            continue
        good, last = caught(known[name])
        missed += not good
        print(f"{name}: {'caught' if good else 'NOT CAUGHT'}: {last}", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
