"""Compare triton.autotune and tritile.autotune on kernels of neither, on the current GPU.

    python tuning/compare_autotune.py                    # as many problems as begin within 150 s
    python tuning/compare_autotune.py --only attention   # those with that in "kernel shape"

For each problem: the seconds of a first call with nothing compiled or remembered, by each tuner with the
same list of configs and by tritile with the whole space, each in a process of its own; then what they
chose, timed side by side. For each kernel: what a warm call costs the host. A line is kept in
tuning/results/<gpu>/autotune.json as soon as its problem is measured, in place of an older one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import compare_sides as sides
from authors import SUBJECTS, configs_of
from compare_rows import (
    TUNERS,
    Problem,
    Row,
    host_row,
    keep,
    shape_from,
    shape_text,
    summary,
    tables,
    tuning_row,
)
from tritile.core.config import Config
from tritile.core.device import Device, current_gpu
from tritile.lab.report.environment import environment

HERE = Path(__file__).resolve().parent
DTYPE = torch.bfloat16
# In the order measured: one of each kernel first, so that a short run has seen every kernel.
PROBLEMS: tuple[Problem, ...] = (
    ("softmax", (4096, 8192)),
    ("layer_norm", (8192, 4096)),
    ("attention", (4, 32, 4096, 128, 1)),
    ("softmax", (4096, 1000)),
    ("layer_norm", (8192, 768)),
    ("attention", (4, 32, 1024, 128, 0)),
    ("softmax", (4096, 32768)),
    ("layer_norm", (8192, 8191)),
    ("attention", (4, 32, 1777, 128, 1)),
)
TINY: dict[str, tuple[int, ...]] = {
    "softmax": (4, 64), "layer_norm": (4, 64), "attention": (1, 1, 16, 64, 0)
}  # fmt: skip
_TIMEOUT_S = 300.0  # of one child
Answers = dict[str, dict[str, Any]]


def cold_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of a process that remembers nothing and has time to try every config."""
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TRITILE_CACHE_DIR": str(folder / "tritile")}
    paths = [str(HERE.parent), *filter(None, [environ.get("PYTHONPATH")])]
    rest = {"TRITILE_TUNE_BUDGET": "600", "PYTHONPATH": os.pathsep.join(paths)}
    return {name: v for name, v in environ.items() if name != "TRITILE_MODE"} | caches | rest


def answer_in(out: str) -> dict[str, Any]:
    """Return the answer that a child printed: the last line that is a JSON object."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"no answer in {out[-200:]!r}")


class Child:
    """Tune one kernel for one problem in a process of its own, with empty caches.

    The process imports what it needs at once and then waits for `answer`, so that its start takes no time.
    """

    def __init__(self, side: str, problem: Problem, script: Path = HERE / "compare_autotune.py") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cold-")
        words = [side, problem[0], shape_text(problem[1])]
        self._what = " ".join(words)
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--child", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=cold_environment(os.environ, Path(self._folder.name)),
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Let the child tune, and return its answer. Raises RuntimeError with its last output if it fails."""
        try:
            out, err = self._process.communicate("go\n", timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self._what} took more than {_TIMEOUT_S} s") from None
        if self._process.returncode:
            raise RuntimeError(f"{self._what} failed: {err.strip()[-500:]}")
        return answer_in(out)

    def close(self) -> None:
        """Kill the child and remove its caches."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            stream.close()
        self._folder.cleanup()


def child(side: str, name: str, shape: Sequence[int]) -> None:
    """Wait for the parent, tune, and print the answer."""
    sys.stdin.readline()
    torch.cuda.init()
    print(json.dumps(sides.tuned(side, SUBJECTS[name], SUBJECTS[name].inputs(shape, DTYPE))), flush=True)


def tunings(
    problems: Sequence[Problem], start: Callable[[str, Problem], Any]
) -> Iterator[tuple[Problem, Answers | str]]:
    """Yield each problem with its tuners' answers, or a reason; one child tunes while the next starts."""
    tasks = [(problem, side) for problem in problems for side in TUNERS]
    children = [start(tasks[0][1], tasks[0][0])] if tasks else []
    answers: Answers = {}
    failure = ""
    try:
        for number, (problem, side) in enumerate(tasks):
            mine = children[0]
            children += [start(s, p) for p, s in tasks[number + 1 : number + 2]]
            try:
                answers[side] = mine.answer()
            except RuntimeError as error:
                failure = str(error)
            children.pop(0).close()
            if side == TUNERS[-1]:
                yield problem, failure or answers
                answers, failure = {}, ""
    finally:
        for one in children:
            one.close()


def measured_host(name: str, env: Mapping[str, str]) -> Row:
    """Return the line of what a warm call of this kernel costs the host."""
    given = SUBJECTS[name].inputs(TINY[name], DTYPE)
    return host_row((name, TINY[name]), sides.host_us(sides.warm_calls(SUBJECTS[name], given)), env)


def compare(problems: Sequence[Problem], path: Path, gpu: Device, budget_s: float) -> tuple[list[Row], int]:
    """Measure the problems that begin within the budget, and keep each line at once.

    Return all lines of the file, and how many problems failed.
    """
    start, env, failed = time.monotonic(), environment(gpu), 0
    rows = keep(path, [measured_host(name, env) for name in dict.fromkeys(name for name, _ in problems)])
    left = list(problems)
    for problem, answers in tunings(problems, Child):
        left.remove(problem)
        if isinstance(answers, str):
            print(answers, file=sys.stderr)
            failed += 1
        else:
            subject = SUBJECTS[problem[0]]
            configs = {side: Config.from_dict(answer["config"]) for side, answer in answers.items()}
            timings = sides.timed(subject, subject.inputs(problem[1], DTYPE), configs, gpu.l2_bytes)
            counts = len(subject.configs), len(configs_of(subject.parameters, subject.where))
            rows = keep(path, [tuning_row(problem, counts, answers, timings, env)])
            torch.cuda.empty_cache()
        print(f"{time.monotonic() - start:.0f} s: {problem[0]} {shape_text(problem[1])}", flush=True)
        if left and time.monotonic() - start > budget_s:
            print(f"the time is up; left: {', '.join(f'{n} {shape_text(s)}' for n, s in left)}")
            break
    return rows, failed


def main() -> int:
    """Compare on the current GPU; the exit status is 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="problems with this in 'kernel shape'")
    parser.add_argument(
        "--budget", type=float, default=150, metavar="S", help="begin none after these seconds"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: tuning/results/<gpu>")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "KERNEL", "SHAPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        side, name, shape = given.child
        child(side, name, shape_from(shape))
        return 0
    gpu = current_gpu()
    problems = [p for p in PROBLEMS if given.only in f"{p[0]} {shape_text(p[1])}"]
    if gpu is None or not problems:
        print("no GPU here" if gpu is None else f"no problem has {given.only!r} in its name", file=sys.stderr)
        return 1
    path = (given.results or HERE / "results" / gpu.slug) / "autotune.json"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITILE_CACHE_DIR"] = folder  # the warm calls of this process are tuned apart
        rows, failed = compare(problems, path, gpu, given.budget)
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in tables(rows):
        console.print(table)
    for name, mean in summary(rows).items():
        console.print(f"{name}: triton / tritile {mean:.3f} (geometric mean)")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
