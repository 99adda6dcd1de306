"""Compare triton.autotune and tritile.autotune on kernels of neither, on the current GPU.

    python tuning/compare_autotune.py                    # every problem: some minutes
    python tuning/compare_autotune.py --only attention   # those with that in "kernel shape"

For each problem: the seconds of a first call with nothing compiled or remembered, by each tuner with the
same list of configs and by tritile with the whole space, each in a process of its own; then what they
chose, timed side by side. For each kernel: what a warm call costs the host. A line is kept in
tuning/results/<gpu>/autotune.json as soon as its problem is measured, in place of an older one.

A side is "triton" or "tritile" (both with the same list of configs), or "space" (tritile with the whole
space); of warm calls also "jit", the bare kernel with its parameters given.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton

import tritile
from authors import SUBJECTS, Subject, configs_of
from bench import host_us
from tritile.core.config import Config
from tritile.core.device import current_gpu
from tritile.lab.environment import environment
from tritile.tuner.measure.timing import Graph, copies_for, interleaved, timing_of
from unseen import environ

HERE = Path(__file__).resolve().parent
DTYPE = torch.bfloat16
PROBLEMS = (
    "softmax 4096x8192", "softmax 4096x1000", "softmax 4096x32768", "layer_norm 8192x4096",
    "layer_norm 8192x768", "layer_norm 8192x8191", "attention 4x32x4096x128x1", "attention 4x32x1024x128x0",
    "attention 4x32x1777x128x1",
)  # fmt: skip
TINY = ("softmax 4x64", "layer_norm 4x64", "attention 1x1x16x64x0")  # whose warm calls are timed
SIDES = ("triton", "tritile", "space")
ALLOWED_ERROR = 2e-2  # |out - reference| / |reference|: twice the epsilon of bfloat16, and some
Arguments = Mapping[str, Any]
Row = dict[str, Any]


def posed(problem: str) -> tuple[Subject, Arguments]:
    """Return the subject and the arguments of "kernel shape"."""
    name, shape = problem.split()
    return SUBJECTS[name], SUBJECTS[name].inputs([int(size) for size in shape.split("x")], DTYPE)


def decorated(side: str, subject: Subject, **more: Any) -> Any:
    """Decorate the kernel with one of the tuners."""
    if side == "triton":
        return triton.autotune(subject.configs, subject.key, **more)(subject.kernel)
    configs = tritile.Space(subject.parameters, subject.where) if side == "space" else subject.configs
    return tritile.autotune(configs, subject.key, reference=subject.reference, **more)(subject.kernel)


def error_of(subject: Subject, given: Arguments) -> float:
    """Return the largest |out - reference| / |reference| of the outputs; infinite for a NaN."""
    errors = []
    for name, wanted in subject.reference(**given).items():
        error = (given[name].float() - wanted.float()).norm() / wanted.float().norm()
        errors.append(float(error.nan_to_num(nan=math.inf)))
    return max(errors)


def tuned(side: str, subject: Subject, given: Arguments, **more: Any) -> Row:
    """Make the first call, which tunes, and return its seconds and the config; `more` goes to the decorator.

    Raises RuntimeError where the tuned kernel's answer is wrong.
    """
    kernel, grid = decorated(side, subject, **more), subject.grid(**given)
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    with tritile.mode("tune"):
        kernel[grid](*given.values())
    wait()
    seconds, error = time.perf_counter() - start, error_of(subject, given)
    if not error <= ALLOWED_ERROR:
        raise RuntimeError(f"{side} chose {kernel.best_config}, whose relative error is {error:.3g}")
    return {"seconds": seconds, "config": Config.from_triton(kernel.best_config).to_dict()}


def tuned_cold(side: str, problem: str) -> Row:
    """Return what `tuned` does in a process of its own, with empty caches and time for every config."""
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TRITON", "TRITILE")}
        paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        given = os.environ | caches | {"TRITILE_TUNE_BUDGET": "600", "PYTHONPATH": paths}
        command = [sys.executable, __file__, "--child", side, "--only", problem]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{side} {problem} failed: {done.stderr.strip()[-500:]}")
    answer: Row = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] == "{"))
    return answer


def timed(subject: Subject, given: Arguments, configs: Mapping[str, Config], l2_bytes: int) -> Row:
    """Time each side's config by turns, in CUDA graphs on cold operands: microseconds and spread."""
    tensors = {name: v for name, v in given.items() if isinstance(v, torch.Tensor)}
    count = copies_for(sum(v.numel() * v.element_size() for v in tensors.values()), l2_bytes)
    calls = [{**given, **{name: v.clone() for name, v in tensors.items()}} for _ in range(count)]

    def run_of(config: Config) -> Callable[[Any], None]:
        options = config.to_triton().all_kwargs()
        return lambda call: subject.kernel[subject.grid(**call)](*call.values(), **options)

    graphs = [Graph(run_of(config), calls) for config in configs.values()]
    row: Row = {}
    samples = interleaved(graphs, budget_ms=150.0 * len(graphs))
    for side, times in zip(configs, samples, strict=True):
        found = timing_of(times)
        row |= {f"{side}_us": round(found.us, 3), f"{side}_spread": round(found.spread, 4)}
    return row


def warm_calls(subject: Subject, given: Arguments, **more: Any) -> dict[str, Callable[[], Any]]:
    """Return the same launch by the bare kernel and by both tuners, already tuned, as a program writes it."""
    grid, values, first = subject.grid(**given), list(given.values()), subject.configs[0].all_kwargs()
    calls: dict[str, Callable[[], Any]] = {"jit": lambda: subject.kernel[grid](*values, **first)}
    for side in ("triton", "tritile"):
        kernel = decorated(side, subject, **more)
        with tritile.mode("tune"):
            kernel[grid](*values)
        calls[side] = lambda kernel=kernel: kernel[grid](*values)
    return calls


def host_row(problem: str) -> Row:
    """Return what warm calls cost the host."""
    with tempfile.TemporaryDirectory() as folder, environ(TRITILE_CACHE_DIR=folder):  # tuned apart
        calls = warm_calls(*posed(problem))
        us = zip(calls, host_us(*calls.values()), strict=True)
        return {"measures": "host"} | {f"{side}_host_us": round(value, 3) for side, value in us}


def tuning_row(problem: str, l2_bytes: int) -> Row:
    """Return seconds and configs of each tuner, and microseconds of what each chose."""
    subject, given = posed(problem)
    answers = {side: tuned_cold(side, problem) for side in SIDES}
    row: Row = {"configs": len(subject.configs), "space": len(configs_of(subject.parameters, subject.where))}
    for side, answer in answers.items():
        row |= {f"{side}_s": round(answer["seconds"], 3), f"{side}_config": answer["config"]}
    configs = {side: Config.from_dict(answer["config"]) for side, answer in answers.items()}
    row |= timed(subject, given, configs, l2_bytes)
    return {"measures": "tuning"} | row | {"ratio": round(row["triton_us"] / row["tritile_us"], 4)}


def keep(path: Path, row: Row) -> None:
    """Put a line into a file, in place of an older one of the same problem."""
    rows = [*(json.loads(path.read_text()) if path.exists() else []), row]
    held = {(row["measures"], row["kernel"], row["problem"]): row for row in rows}
    path.write_text("[\n" + ",\n".join(json.dumps(held[key]) for key in sorted(held)) + "\n]\n")


def main() -> int:
    """Compare on the current GPU; the exit status is 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="problems with this in 'kernel shape'")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    asked, gpu = parser.parse_args(), current_gpu()
    if asked.child:
        print(json.dumps(tuned(asked.child, *posed(asked.only))), flush=True)
        return 0
    if gpu is None:
        sys.exit("there is no GPU here to measure")
    failed, env = 0, environment(gpu)
    for problem in (each for each in (*TINY, *PROBLEMS) if asked.only in each):
        name, shape = problem.split()
        try:
            row = host_row(problem) if problem in TINY else tuning_row(problem, gpu.l2_bytes)
        except RuntimeError as error:
            failed += 1
            print(error, file=sys.stderr)
            continue
        row |= {"kernel": name, "problem": shape, "env": env}
        keep(HERE / "results" / gpu.slug / "autotune.json", row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
