"""Run the tests that need a GPU, and record what passed in last.json.

    python tests/gpu/run.py              # the files whose kernels or own code changed since they last passed
    python tests/gpu/run.py --all        # every file
    python tests/gpu/run.py --all --shard 1/2      # half of the tests; 2/2 later, or on another machine
    python tests/gpu/run.py --merge JOURNAL...     # run nothing: take in journals of shards from elsewhere
    python tests/gpu/run.py --pending "no GPU"     # run nothing: say why all that is not tested is not

Each test is journalled as it ends. A run that was cut short goes on where it stopped when it is started
again; tests that failed run anew. Once every test of a file has passed or was skipped, by whichever shards,
last.json says so, and of a kernel once all files that concern it have. The journal of a run that is complete
is renamed, so that the next one starts afresh. Tests marked serial come last, in one process. Any
interpreter that has torch, triton, pytest and pytest-xdist will do; `--workers 0` needs no pytest-xdist.
Options that are not listed go to pytest.
"""

import argparse
import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu import tested  # noqa: E402
from tritile.lab.environment import environment  # noqa: E402

HERE = Path(__file__).parent
JOURNAL = HERE / ".journal.jsonl"
# Each file's kernels, as "op/", and other modules of the package that it tests. A file that is not named here
# concerns every kernel.
_TUNED = "matmul/", "permute/"
CONCERNS = {
    "test_authors_gpu.py": ("tune",),
    "test_calibrate_gpu.py": (*_TUNED, "linear_quantized/", "tune", "planning/portfolio"),
    "test_explain_gpu.py": ("matmul/", "lab/explain"),
    "test_grouped_gpu.py": ("grouped/",),
    "test_invariant_gpu.py": ("matmul/", "linear_quantized/"),
    "test_nn_gpu.py": ("matmul/", "linear_quantized/", "nn"),
    "test_operators_gpu.py": (*_TUNED, "ops/operators"),
    "test_pages_gpu.py": ("cli", "nn", "ops", "tune"),
    "test_parallel_gpu.py": ("matmul/", "ops/operators"),
    "test_permute_gpu.py": ("permute/",),
    "test_quantized_gpu.py": ("linear_quantized/",),
    "test_remember_gpu.py": (*_TUNED, "tune", "planning"),
    "test_rungs_gpu.py": (),  # the kernels of tuning/, which it imports
    "test_tuner_gpu.py": (*_TUNED, "tune"),
    "test_warm_gpu.py": ("matmul/", "lab/warm", "planning/table"),
    **{f"test_{name}_gpu.py": ("matmul/",) for name in ("families", "skinny", "fp16x3", "fused", "matmul")},
}


def files() -> list[str]:
    """The names of all files of GPU tests."""
    return sorted(path.name for path in HERE.glob("test_*.py"))


def kernels_of(file: str) -> list[str]:
    """The kernels that a file tests."""
    begun = tuple(name for name in CONCERNS.get(file, ("",)) if name.endswith("/") or not name)
    return [kernel for kernel in tested.digests() if kernel.startswith(begun)]


@functools.cache
def _imported(path: Path) -> frozenset[Path]:
    """The files of tests/ and tuning/ that one imports."""
    bases = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            is_test = node.module.split(".")[0] == "tests"
            bases |= {f"{node.module}.{alias.name}" for alias in node.names} if is_test else set()
            bases.add(node.module if is_test else f"tuning.{node.module}")
        elif isinstance(node, ast.Import):
            bases |= {f"tuning.{alias.name}" for alias in node.names}
    paths = (ROOT / f"{base.replace('.', '/')}.py" for base in bases)
    return frozenset(path for path in paths if path.is_file())


def _helpers(path: Path) -> set[Path]:
    """A file of tests, and the files of tests/ and tuning/ that it imports."""
    found, pending = set[Path](), {path}
    while pending:
        one = pending.pop()
        found.add(one)
        pending |= _imported(one) - found
    return found


def _modules(room: str) -> list[Path]:
    """The files of a module or a folder of the package."""
    module = tested.PACKAGE / f"{room}.py"  # first: a folder that it replaced may be left, without code
    return [module] if module.is_file() else sorted((tested.PACKAGE / room).rglob("*.py"))


def key_of(file: str) -> str:
    """A digest of all that a file's passing counts for: its own code, its kernels, the modules it tests."""
    rooms = [name for name in CONCERNS.get(file, ()) if not name.endswith("/")]
    own = [HERE / file, HERE / "conftest.py"]
    paths = [path for each in own for path in _helpers(each)] + [p for room in rooms for p in _modules(room)]
    parts = [
        (p.relative_to(ROOT).as_posix(), tested.code_of(p.read_text(encoding="utf-8")))
        for p in dict.fromkeys(paths)
    ]
    return tested.hashed([*parts, *((kernel, tested.digests()[kernel]) for kernel in kernels_of(file))])


def read_journal(paths: Iterable[Path]) -> list[dict]:
    """The lines of journals; one that a kill cut short is left out."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _stack(line: dict) -> tuple[str, str]:
    return line["triton"], line["gpu"]


def outcomes(journal: Iterable[dict]) -> dict[tuple, dict]:
    """By stack, file and key: how many tests there are, and each one's last line."""
    found: dict[tuple, dict] = {}
    for line in journal:
        of_file = found.setdefault((*_stack(line), line["file"], line["key"]), {"count": None, "tests": {}})
        if "test" in line:
            of_file["tests"][line["test"]] = line
        else:
            of_file["count"] = line["tests"]
    return found


def done_in(journal: Iterable[dict], stack: tuple[str, str], keys: dict[str, str]) -> list[str]:
    """The tests that need not run again on a stack."""
    found = []
    for (*where, file, key), of_file in outcomes(journal).items():
        if tuple(where) == stack and keys.get(file) == key:
            found += [test for test, line in of_file["tests"].items() if line["outcome"] != "failed"]
    return sorted(found)


def _passed(journal: list[dict], keys: dict[str, str]) -> list[dict]:
    """A line for each file all of whose tests passed, or were skipped, as it is now."""
    lines = []
    for (triton, gpu, file, key), of_file in outcomes(journal).items():
        found = list(of_file["tests"].values())
        ended = [line["outcome"] for line in found]
        if keys.get(file) == key and len(found) == of_file["count"] and "failed" not in ended:
            lines.append(
                {
                    "file": file, "triton": triton, "gpu": gpu, "key": key, "torch": found[-1]["torch"],
                    "commit": found[-1]["commit"], "passed": ended.count("passed"),
                    "skipped": ended.count("skipped"),
                    "seconds": round(sum(line["seconds"] for line in found)),
                }
            )  # fmt: skip
    return lines


def _kernels(passed: list[dict], keys: dict[str, str]) -> list[dict]:
    """A line for each kernel and stack on which every file that concerns it passed as it is now."""
    lines = []
    for triton, gpu in sorted({_stack(line) for line in passed}):
        here = {line["file"]: line for line in passed if _stack(line) == (triton, gpu)}
        now = {file: line for file, line in here.items() if keys.get(file) == line["key"]}
        for kernel, digest in tested.digests().items():
            wanted = [file for file in keys if kernel in kernels_of(file)]
            if not wanted or not all(file in now for file in wanted):
                continue
            last = now[wanted[-1]]
            counts = {how: sum(now[file][how] for file in wanted) for how in ("passed", "skipped")}
            if counts["passed"]:
                about = {name: last[name] for name in ("torch", "commit")}
                lines.append(
                    {"kernel": kernel, "triton": triton, "gpu": gpu, "digest": digest} | about | counts
                )
    return lines


def merged(last: dict, journal: list[dict], keys: dict[str, str]) -> dict:
    """What last.json is to hold: its lines of what is still there, or those of what passed since."""
    found = {(*_stack(line), line["file"]): line for line in last["files"] if line["file"] in keys}
    found |= {(*_stack(line), line["file"]): line for line in _passed(journal, keys)}
    passed = [found[where] for where in sorted(found)]
    kernels = {
        (*_stack(line), line["kernel"]): line
        for line in last["kernels"]
        if line["kernel"] in tested.digests()
    }
    kernels |= {(*_stack(line), line["kernel"]): line for line in _kernels(passed, keys)}
    return {"kernels": [kernels[where] for where in sorted(kernels)], "files": passed}


def _write(path: Path, record: dict) -> None:
    """A record as JSON, a line an entry, whole or not at all."""
    parts = []
    for name, lines in record.items():
        text = ",\n".join(json.dumps(line, sort_keys=True) for line in lines)
        parts.append(f'"{name}": [\n{text}\n]' if lines else f'"{name}": []')
    partial = path.with_suffix(".tmp")
    partial.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    partial.replace(path)


def record(journals: list[Path], keys: dict[str, str]) -> list[dict]:
    """Take journals into last.json; the lines of those that failed."""
    journal = read_journal(journals)
    last = merged(tested.read(HERE / "last.json"), journal, keys)
    _write(HERE / "last.json", last)
    _write(HERE / "pending.json", {"kernels": _pending(None)})
    now = {at: of for at, of in outcomes(journal).items() if keys.get(at[2]) == at[3]}
    return [line for of in now.values() for line in of["tests"].values() if line["outcome"] == "failed"]


def _last(stack: tuple[str, str]) -> dict[str, str]:
    """The key with which each file last passed on a stack."""
    lines = tested.read(HERE / "last.json")["files"]
    return {line["file"]: line["key"] for line in lines if _stack(line) == stack}


def _pending(reason: str | None) -> list[dict]:
    """Lines for all that is not tested, with `reason` where it is given, else with the reason it has."""
    waiting = [(what, reason or what.reason) for what in tested.pending(HERE)]
    return [
        {"kernel": what.kernel, "triton": what.triton, "digest": what.digest, "reason": why}
        for what, why in waiting if why
    ]  # fmt: skip


def _pytest(wanted: argparse.Namespace, plan: dict, marks: str, workers: int, until: float) -> int:
    """Run pytest in a process of its own until a time; its exit status, 124 where it was stopped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan), encoding="utf-8")
        names = [str(HERE / file) for file in plan["keys"]]
        options = ["-q", "-m", marks, "-p", "tests.gpu.recorder", "-p", "no:cacheprovider", "--durations=15"]
        options += ["-n", str(workers), "--dist", "worksteal"] if workers else []
        environ = os.environ | {
            "TRITILE_GPU_PLAN": str(path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "pytest", *options, *wanted.rest, *names]
        try:  # of the same process group, so that whoever ends this ends that; workers end with pytest
            limit = max(1.0, until - time.monotonic()) if until else None
            return subprocess.run(command, cwd=ROOT, env=environ, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return 124


def run(wanted: argparse.Namespace, keys: dict[str, str]) -> int:
    """Run what is wanted, record what passed, and say what did not; the exit status."""
    facts = environment()
    if not facts["gpu"]:
        print("no GPU that torch can use: nothing is run")
        return 1
    stack = (facts["triton"], facts["gpu"])
    if not wanted.all:
        last = _last(stack)
        keys = {file: key for file, key in keys.items() if last.get(file) != key}
    if not keys:
        print("nothing changed since the tests last passed: --all runs them all the same")
        return 0
    print(f"{len(keys)} files on triton {stack[0]}, {stack[1]}: {', '.join(keys)}", flush=True)
    number, shards = map(int, wanted.shard.split("/"))
    plan = {
        "journal": str(wanted.journal), "keys": keys, "shard": [number, shards],
        "stack": {"triton": stack[0], "gpu": stack[1], "torch": facts["torch"], "commit": facts["tritile"]},
    }  # fmt: skip
    until = time.monotonic() + wanted.limit if wanted.limit else 0.0
    statuses = []
    for marks, workers in (("gpu and not serial", wanted.workers), ("gpu and serial", 0)):
        plan["done"] = done_in(read_journal([wanted.journal]), stack, keys)
        statuses.append(_pytest(wanted, plan, marks, workers, until))
    failed = record([wanted.journal], {file: key_of(file) for file in files()})
    for line in failed:
        print(f"failed: {line['test']}")
    left = [file for file, key in keys.items() if _last(stack).get(file) != key]
    if left:
        print(f"not complete yet: {', '.join(left)}")
    elif wanted.journal.is_file():
        wanted.journal.replace(wanted.journal.with_suffix(".done.jsonl"))
    return int(bool(failed) or any(status not in (0, 5) for status in statuses))  # 5: no tests left


def main() -> int:
    """Run tests, take in journals, or give a reason; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every file, not only what changed")
    parser.add_argument("--only", nargs="+", default=None, metavar="FILE", help="these files alone")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="at a time")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="stop after so many")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="where tests are journalled")
    parser.add_argument("--fresh", action="store_true", help="forget the journal: run what passed again")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JOURNAL", help="journals of other shards")
    parser.add_argument("--pending", metavar="REASON", help="why what is not tested is not")
    wanted, wanted.rest = parser.parse_known_args()
    keys = {file: key_of(file) for file in files()}
    if wanted.pending:
        _write(HERE / "pending.json", {"kernels": _pending(wanted.pending)})
        return 0
    if wanted.merge:
        with wanted.journal.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in read_journal(wanted.merge))
        return int(bool(record([wanted.journal], keys)))
    if wanted.fresh:
        wanted.journal.unlink(missing_ok=True)
    return run(wanted, {file: key for file, key in keys.items() if file in (wanted.only or keys)})


if __name__ == "__main__":
    raise SystemExit(main())
