"""Run public kernels, sources unchanged, under triton.autotune and adopted by `tritile run`.

    python tuning/adopted.py --fetch .gpu-sources   # the sources, from GitHub; needs einops, packaging, tqdm
    python tuning/adopted.py --list
    python tuning/adopted.py --output tuning/results/GPU [--only fla]
    python tuning/adopted.py --output tuning/results/GPU --day

Each case of `adopted_cases.py` runs in processes of its own: by plain Triton with empty caches; by
`tritile run` with empty caches; and by `tritile run` again, with what the one before left. Seconds are of
the first call, to the end of its work on the GPU. A fourth process times the operation with the configs that
Triton chose and with those that tritile chose, by turns. Cases run at once on as many GPUs as there are. A
line of each is appended to `adopted.jsonl`.

`--day` is a server's: a model of three libraries, called with 200 sequence lengths.
"""

import argparse
import gc
import json
import math
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import adopted_cases
from adopted_cases import CASES, SOURCES, Case, normal

SIDES: Final = ("triton", "first", "second")  # the latter two are adopted
STALL_S: Final = 0.1
REQUESTS: Final = 200
MARK: Final = "@@"  # begins lines that a child writes for its parent
Row = dict[str, Any]


# --- In a process of its own: without tritile before the first call, as in a user's program ---


def tuners() -> Iterator[tuple[str, Any]]:
    """Yield what triton.autotune made, by name."""
    from triton.runtime.autotuner import Autotuner

    for each in gc.get_objects():
        if issubclass(type(each), Autotuner) and not type(each).__module__.startswith("tritile."):
            yield f"{each.base_fn.__module__}.{each.base_fn.__qualname__}", each


def chosen() -> dict[str, dict[str, Row]]:
    """Return the configs in the caches of all tuners, by kernel and key."""
    found: dict[str, dict[str, Row]] = {}
    for name, tuner in tuners():
        if len(tuner.configs) > 1 and tuner.cache:
            found.setdefault(name, {}).update(
                {repr(key): each.all_kwargs() for key, each in tuner.cache.items()}
            )
    return found


class Answers(dict[Any, Any]):
    """The cache of a tuner in which each problem has an answer, found by how its key is written."""

    def __init__(self, tuner: Any, configs: Mapping[str, Row]) -> None:
        self.configs = {text: config_like(tuner, config) for text, config in configs.items()}

    def __contains__(self, key: object) -> bool:
        return repr(key) in self.configs

    def __getitem__(self, key: Any) -> Any:
        return self.configs[repr(key)]

    def get(self, key: Any, default: Any = None) -> Any:
        return self.configs.get(repr(key), default)


def config_like(tuner: Any, wanted: Row) -> Any:
    """Return a tuner's own config with these arguments; one that its pruning made may be in no list."""
    import triton

    for config in tuner.configs:
        if config.all_kwargs() == wanted:
            return config
    options = {
        name: wanted[name] for name in ("num_warps", "num_stages", "num_ctas", "maxnreg") if name in wanted
    }
    rest = {name: value for name, value in wanted.items() if name not in options}
    return triton.Config(rest, pre_hook=tuner.configs[0].pre_hook, **options)


def error_of(got: Any, wanted: Any) -> float:
    """Return the largest |out - reference| / |reference| of outputs; infinite for NaN or other shapes."""
    errors = []
    for out, right in zip(got, wanted, strict=True):
        if out.shape != right.shape:
            return math.inf
        error = (out.double() - right.double()).norm() / right.double().norm()
        errors.append(float(error.nan_to_num(nan=math.inf)))
    return max(errors)


def run_case(case: Case) -> Row:
    """Make the first call, and a second: seconds, the error, and what was chosen."""
    import torch

    torch.manual_seed(0)
    run, reference = case.build("cuda", *case.size)
    torch.cuda.synchronize()
    print(MARK, "begin", flush=True)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        got = run()
        torch.cuda.synchronize()
        times.append(round(time.perf_counter() - start, 4))
    print(MARK, "end", flush=True)
    error = error_of(got, reference())
    row: Row = {
        "first_s": times[0],
        "again_s": times[1],
        "error": float(f"{error:.3g}"),
        "allowed": case.allowed,
    }
    adoption = sys.modules.get("tritile.tuner.adoption")
    report = [str(each) for one in getattr(adoption, "_adoptions", ()) for each in one.report]
    return row | {"chosen": chosen(), "report": report}


def compared(case: Case, choices: Mapping[str, Mapping[str, Mapping[str, Row]]]) -> Row:
    """Time the operation with the configs of each side, by turns, in CUDA graphs where it can be captured."""
    import torch

    from tritile.core.device import current_gpu
    from tritile.tuner.measure.timing import copies_for, graph_of, interleaved, timing_of

    gpu = current_gpu()
    assert gpu is not None
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    calls = [case.build("cuda", *case.size)[0]]
    copies = copies_for(torch.cuda.memory_allocated() - before, gpu.l2_bytes)
    calls += [case.build("cuda", *case.size)[0] for _ in range(min(copies, 8) - 1)]
    print(MARK, "begin", flush=True)
    timers = []
    for configs in choices.values():
        for name, tuner in tuners():
            if name in configs:
                tuner.cache = Answers(tuner, configs[name])
        timers.append(graph_of(lambda call: call(), calls))
    print(MARK, "end", flush=True)
    row: Row = {"timed": type(timers[0]).__name__.lower()}
    for side, samples in zip(choices, interleaved(timers, budget_ms=600.0), strict=True):
        found = timing_of(samples)
        row |= {f"{side}_us": round(found.us, 3), f"{side}_spread": round(found.spread, 4)}
    return row


def day() -> Row:
    """Serve requests of 200 lengths: a norm of attorch's, q, k and v by xformers, a convolution of fla's."""
    import torch
    from attorch.layer_norm_layer import LayerNormAutoGrad
    from fla.modules.conv.triton.ops import causal_conv1d_fwd
    from xformers.ops._triton.tiled_matmul_kernels import _launch_triton_matmul

    torch.manual_seed(0)
    dice, width = random.Random(0), 4096
    lengths = [round(math.exp(dice.uniform(math.log(16), math.log(8192)))) for _ in range(REQUESTS)]
    weight, bias, taps = normal("cuda", width), normal("cuda", width), normal("cuda", width, 4)
    weights = [normal("cuda", width, size) for size in (width, width // 4, width // 4)]
    seconds, until = list[float](), time.monotonic() + float(os.environ["DAY_LIMIT_S"])
    for length in lengths:
        x = normal("cuda", length, width)
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = LayerNormAutoGrad.apply(x, weight, bias, 1e-5)
        outs = [y.new_empty(length, each.shape[1]) for each in weights]
        _launch_triton_matmul(
            [[y]], [weights], [outs], [length], [each.shape[1] for each in weights], [width]
        )
        causal_conv1d_fwd(outs[0][None], taps, None, None, activation="silu")
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if time.monotonic() > until:
            break
    return {
        "requests": len(seconds),
        "lengths": len(set(lengths[: len(seconds)])),
        "seconds": round(sum(seconds), 3),
        "stalls": sum(each > STALL_S for each in seconds),
        "longest_s": round(max(seconds), 3),
    }


# --- In the parent ---


def environ_of(side: str, folder: str, gpu: str) -> dict[str, str]:
    """Return the environment of a child: empty caches for Triton, and others for both adopted processes."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("TRITILE_ADOPT")}
    caches = {name: f"{folder}/{'triton' if side in ('triton', 'compared') else 'tritile'}/{name}"
              for name in ("TRITON_CACHE_DIR", "TRITILE_CACHE_DIR")}  # fmt: skip
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [given.get("PYTHONPATH")])])
    return given | caches | {
        "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": paths, "TRITON_PRINT_AUTOTUNING": "1"
    }  # fmt: skip


def in_child(asked: argparse.Namespace, side: str, name: str, folder: str, gpu: str, *tritile: str) -> Row:
    """Return a child's line, and what it wrote beside: searches and their seconds, and warnings.

    Raises RuntimeError where it fails.
    """
    command = [
        sys.executable,
        __file__,
        "--child",
        side,
        "--only",
        name,
        "--sources",
        str(asked.sources),
        "--folder",
        folder,
    ]
    if side in ("first", "second"):
        command = [sys.executable, "-m", "tritile", "run", *tritile, *command]
    try:
        done = subprocess.run(
            command, env=environ_of(side, folder, gpu), capture_output=True, text=True, timeout=asked.limit
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it took over {asked.limit:g} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{MARK} {{")]
    if done.returncode or not lines:
        raise RuntimeError(done.stderr.strip()[-800:] or f"exit status {done.returncode}")
    row: Row = json.loads(lines[-1].removeprefix(MARK))
    measured = done.stdout.partition(f"{MARK} begin")[2].partition(f"{MARK} end")[0]
    times = [float(each) for each in re.findall(r"finished after ([\d.]+)s", measured)]
    warned = {line.partition("Warning: ")[2] for line in done.stderr.splitlines() if "Warning: " in line}
    own = sorted(text[:200] for text in warned if "tritile" in text or "config" in text)
    return row | {"tuning_s": round(sum(times), 2), "searches": len(times), "warned": own}


def row_of(asked: argparse.Namespace, case: Case, gpu: str) -> Row:
    """Run a case in all of its processes."""
    row: Row = {"op": "adopted", "project": case.project, "case": case.name}
    answers: dict[str, Row] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="adopted-", ignore_cleanup_errors=True) as folder:
        for side in (*SIDES, "compared"):
            if side == "compared":
                if not {"triton", "first"} <= answers.keys():
                    break
                choices = {"triton": answers["triton"]["chosen"], "tritile": answers["first"]["chosen"]}
                Path(folder, "choices.json").write_text(json.dumps(choices))
            try:
                answers[side] = in_child(asked, side, case.name, folder, gpu)
            except RuntimeError as error:
                failed[side] = str(error)
    if compared := answers.pop("compared", None):
        row |= compared | {"ratio": round(compared["triton_us"] / compared["tritile_us"], 4)}
        row["searches_compared"] = row["searches"]  # 0, or what was timed is not what was chosen
    if failed:
        row["failed"] = failed
    row["kernels"] = sorted({name for answer in answers.values() for name in answer["chosen"]})
    row["allowed"] = round(case.allowed, 5)
    row["right"] = {side: answer["error"] <= case.allowed for side, answer in answers.items()}
    for name in ("error", "first_s", "again_s", "tuning_s", "searches"):
        row[name] = {side: answer[name] for side, answer in answers.items()}
    row["chosen"] = {side: {name: [*configs.values()] for name, configs in answer["chosen"].items()}
                     for side, answer in answers.items() if side != "second"}  # fmt: skip
    row |= {name: answers.get("first", {}).get(name, []) for name in ("report", "warned")}
    return row


BUCKETS: Final = (
    "layer_norm_forward_kernel:batch_dim",
    "_xformers_tiled_matmul_kernel:M1",
    "causal_conv1d_fwd_kernel:NB",
)


def day_row(asked: argparse.Namespace, gpus: "queue.Queue[str]") -> Row:
    """A server's first day by Triton and adopted, and its second day adopted."""
    bucket = [word for each in BUCKETS for word in ("--bucket", f"*{each}=next_power_of_2")]

    def served(*sides: str) -> Row:
        gpu = gpus.get()
        try:
            return {side: in_child(asked, side, "day", folder, gpu, *bucket) for side in sides}
        finally:
            gpus.put(gpu)

    os.environ["DAY_LIMIT_S"] = str(asked.limit - 40)
    with (
        tempfile.TemporaryDirectory(prefix="adopted-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor() as pool,
    ):
        plain, adopted = pool.submit(served, "triton"), pool.submit(served, "first", "second")
        return (
            {"op": "adopted", "project": "day", "case": "a server's day"} | plain.result() | adopted.result()
        )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--fetch", type=Path, metavar="FOLDER", help="take the sources into a folder, and end"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and their sources, and end")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the cases")
    parser.add_argument("--sources", type=Path, default=Path(".gpu-sources"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=400, help="seconds of a process (400)")
    parser.add_argument("--day", action="store_true", help="a server's day, in place of the cases")
    parser.add_argument("--child", choices=(*SIDES, "compared"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run what is asked for; the exit status is 0 if every process ended well, and all results were right."""
    asked = arguments().parse_args()
    if asked.fetch:
        adopted_cases.fetch(asked.fetch)
        return 0
    if asked.child:
        adopted_cases.add_to_path(asked.sources)
        if asked.only == "day":
            row = day()
        else:
            case = next(case for case in CASES if case.name == asked.only)
            if asked.child == "compared":
                row = compared(case, json.loads((asked.folder / "choices.json").read_text()))
            else:
                row = run_case(case)
        print(MARK, json.dumps(row), flush=True)
        return 0
    part, parts = map(int, asked.part.split("/"))
    cases = [case for case in CASES if asked.only in case.name][part - 1 :: parts]
    if asked.list:
        for case in cases:
            source = SOURCES[case.project]
            print(f"{case.name:48} https://github.com/{source.repository} at {source.commit[:12]}")
        return 0
    return measure(asked, cases)


def measure(asked: argparse.Namespace, cases: list[Case]) -> int:
    """Run cases on all GPUs, or a server's day."""
    import torch

    from tritile.core.device import current_gpu
    from tritile.lab.environment import environment

    gpu, failed, lock = current_gpu(), list[str](), threading.Lock()
    if gpu is None:
        sys.exit("there is no GPU here to measure")
    gpus: queue.Queue[str] = queue.Queue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    for name in visible.split(","):
        gpus.put(name)

    def keep(row: Row) -> None:
        text = json.dumps(row | {"env": environment(gpu)})
        with lock:
            print(text, flush=True)
            if "failed" in row or not all(row.get("right", {}).values()):
                failed.append(row["case"])
            if asked.output:
                asked.output.mkdir(parents=True, exist_ok=True)
                with (asked.output / "adopted.jsonl").open("a") as file:
                    file.write(text + "\n")

    def one(case: Case) -> None:
        name = gpus.get()
        try:
            keep(row_of(asked, case, name))
        finally:
            gpus.put(name)

    if asked.day:
        keep(day_row(asked, gpus))
    else:
        with ThreadPoolExecutor(gpus.qsize()) as pool:
            list(pool.map(one, cases))
    print(
        f"{len(failed)} of {len(cases)} failed: {', '.join(failed)}" if failed else "all right",
        file=sys.stderr,
    )
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
