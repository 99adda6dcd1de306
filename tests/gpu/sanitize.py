"""Run every family of kernels, one small ragged problem each, under NVIDIA's compute-sanitizer.

    python tests/gpu/sanitize.py [CASE ...]

memcheck and racecheck for each, and Triton's ConSan for `warpgroups` where this Triton has it (3.6 on), but
not for pairs, whose barriers are in PTX. One line a case and tool; ends with 1 where any of them found
anything. Needs a GPU, and compute-sanitizer of the CUDA toolkit in PATH.

Not counted are races within Triton's own dispatch of warps. `warp_specialize` says by a byte of shared memory
which part of the kernel a warp is to run: st.shared, then barrier.sync 1 by every warp of the block, then
ld.shared (read in the PTX of Triton 3.6). racecheck reports the two accesses all the same.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from tritile.choose import waves  # noqa: E402
from tritile.core import device as devices  # noqa: E402
from tritile.core.call import call_for  # noqa: E402
from tritile.core.problem import GroupedProblem, QuantizedProblem  # noqa: E402
from tritile.families import launching  # noqa: E402
from tritile.families.permute.family import in_place  # noqa: E402
from tritile.ops import permute as permute_op  # noqa: E402
from tritile.ops.products import matmul_call  # noqa: E402
from tritile.tune.subject.operands import with_group_ends  # noqa: E402

FOUND, MINUTES = 9, 10
HALF = torch.bfloat16
TOOLS = {
    "memcheck": ["--tool", "memcheck", "--report-api-errors", "no"],  # native.py counts parameters by one
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "analysis"],
}
RACE = re.compile(r"Race reported between \w+ access at .+(?:\n=+ +and \w+ access at .+)*")
LINE = re.compile(r" at (\w+)\+0x\w+ in (\S+\.py):(\d+)")


class Case(NamedTuple):
    """A call on a device, the family that makes it, and which of that family's configs to take."""

    call: Callable[[str], Any]
    family: str
    fits: Callable[[Any], bool] = lambda config: True


def product(m, n, k, dtype=HALF, precision="ieee", turned=True, out=None, **extras):
    """A product whose second operand lies by columns, so that only K decides who can read both."""

    def call(device):
        a = torch.randn(m, k, device=device).to(dtype)
        b = (
            torch.randn(n, k, device=device).to(dtype).mT
            if turned
            else torch.randn(k, n, device=device).to(dtype)
        )
        made = {name: torch.randn(size, device=device).to(dtype) for name, size in extras.items()}
        if "up" in made:
            made |= {"up": made["up"].mT, "activation": "silu"}
        result = torch.empty(m, n, dtype=out or dtype, device=device)
        return matmul_call(a, b, result, precision, **made)

    return call


def permuted(shape, dims, dtype, in_place=False):
    def call(device):
        x = torch.empty(shape, dtype=dtype, device=device).fill_(1)
        out = x if in_place else torch.empty([shape[d] for d in dims], dtype=dtype, device=device)
        return permute_op.permute_call(x, out, dims)

    return call


def stated(problem):
    def call(device):
        def make(dtype, elements):
            kind = getattr(torch, dtype)
            if kind.is_floating_point:
                return torch.randn(elements, device=device).to(kind)
            return torch.randint(0, 99, (elements,), device=device).to(kind)

        return with_group_ends(call_for(problem, make))

    return call


def parameter(name, value):
    return lambda config: config[name] == value


def has(option):
    return lambda config: option in dict(config.kwargs)


GROUPS = GroupedProblem(3, 131, 72, 88, "bfloat16", "bfloat16")
PACKED = QuantizedProblem(37, 80, 512, "bfloat16", 4, 128, True, bias=True)
CASES = {
    "tile": Case(product(131, 77, 83), "tile"),
    "tile-fp32": Case(product(131, 77, 83, torch.float32), "tile"),
    "descriptor": Case(product(131, 77, 88), "descriptor", parameter("SPLIT_K", 1)),
    "descriptor-persistent": Case(product(1027, 1035, 72), "descriptor", parameter("PERSISTENT", True)),
    "descriptor-split-k": Case(product(37, 77, 2056), "descriptor", parameter("SPLIT_K", 4)),
    "repack": Case(product(131, 77, 83, turned=False), "descriptor"),
    "warpgroups": Case(product(131, 77, 88), "warpgroups"),
    "warpgroups-two-consumers": Case(product(259, 203, 328), "warpgroups", parameter("CONSUMERS", 2)),
    "warpgroups-persistent": Case(product(1027, 1035, 72), "warpgroups", parameter("PERSISTENT", True)),
    "split-tail": Case(product(131, 203, 1032), "warpgroups", has("SPLIT_TAIL")),
    "split-tail-two-pieces": Case(
        product(131, 203, 1032),
        "warpgroups",
        lambda config: has("SPLIT_TAIL")(config) and config["BLOCK_N"] == 80,
    ),
    "pairs": Case(product(259, 203, 328), "warpgroups", has("PAIR")),
    "pairs-persistent": Case(
        product(4099, 4107, 72), "warpgroups", lambda config: has("PAIR")(config) and config["PERSISTENT"]
    ),
    "skinny-k": Case(product(3, 77, 1035), "skinny_k"),
    "skinny-k-words": Case(product(3, 77, 1032), "skinny_k"),
    "odd-rows": Case(product(20, 77, 1035), "odd_rows", lambda config: config["SPLIT_K"] == 1),
    "odd-rows-shared": Case(product(20, 77, 1035), "odd_rows", lambda config: config["SPLIT_K"] == 4),
    "skinny-n": Case(product(3, 77, 1035, turned=False), "skinny_n"),
    "skinny-n-words": Case(product(3, 72, 1032, turned=False), "skinny_n"),
    "grouped-tile": Case(stated(GROUPS), "tile"),
    "grouped-descriptor": Case(stated(GROUPS), "descriptor"),
    "permute-tile": Case(permuted((131, 77), (1, 0), torch.float32), "tile"),
    "permute-box": Case(permuted((132, 76), (1, 0), torch.int8), "box"),
    "permute-box-slanted": Case(permuted((641, 131), (1, 0), torch.int8), "box"),
    "permute-box-ends": Case(permuted((3, 641), (1, 0), torch.int8), "box"),
    "permute-box-read": Case(permuted((1021, 2, 5), (1, 0, 2), torch.float16), "box"),
    "transpose-in-place": Case(permuted((77, 77), (1, 0), torch.float32, in_place=True), "tile"),
    "quantized-tile": Case(stated(PACKED), "tile"),
    "quantized-descriptor": Case(stated(PACKED), "descriptor"),
    "gated-tile": Case(product(131, 77, 83, up=(77, 83)), "tile"),
    "gated-descriptor": Case(product(131, 77, 88, up=(77, 88)), "descriptor"),
    "epilogue": Case(product(131, 77, 88, bias=(77,), residual=(131, 77)), "warpgroups"),
    "fp16x3": Case(product(131, 77, 88, torch.float32, "fp16x3"), "descriptor"),
}


def config_of(case, call, device):
    """The likeliest config of the case's family. Raises LookupError where there is none."""
    if case.family == "tile" and getattr(call, "in_place", False):
        return in_place(call.problem)
    for config in waves.ranked(call.problem, device, case.family):
        if case.fits(config):
            return config
    raise LookupError(f"no config of {case.family} for {call.problem.label}")


def run(name):
    """Run a case twice, in this process: the second finds counters and workspaces as the first left them."""
    if os.environ.get("TRITON_INSTRUMENTATION_MODE"):  # what is added to a kernel wants memory of its own
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
    case = CASES[name]
    call = case.call("cuda")
    prepared = launching.prepare(call, config_of(case, call, devices.gpu(0)))
    for _ in range(2):
        prepared(*call.tensors)
    torch.cuda.synchronize()


def told(text):
    """What a sanitizer says in the end, or the last line that anybody said."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.+)", text)
    return found[-1] if found else (text.strip().splitlines() or ["nothing said"])[-1][:150]


KERNEL = ROOT / "tritile" / "families" / "matmul_wgmma" / "kernel.py"  # whose warps are specialised
NAME = "matmul_warpgroups"


def dispatch():
    """Return the lines of Triton's dispatch of warps: the head of the kernel and its last statement."""
    tops = {getattr(top, "name", ""): top for top in ast.parse(KERNEL.read_text(encoding="utf-8")).body}
    start = tops[NAME].body[-1]
    assert "warp_specialize(" in ast.unparse(start)
    lines = {tops[NAME].lineno, *(decorator.lineno for decorator in tops[NAME].decorator_list)}
    lines |= {*range(start.lineno, start.end_lineno + 1)}
    return {(NAME, KERNEL.name, line) for line in lines}


def races(text):
    """Return the races of a racecheck report, each as the lines of source that it lies between."""
    return [
        {(kernel, path, int(line)) for kernel, path, line in LINE.findall(race)}
        for race in RACE.findall(text)
    ]


def checked(name, tool, log):
    """Run a case under a tool; print what it found; return whether that is nothing."""
    # Each tensor an allocation of its own: what is written beside one is seen.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", name]
    if tool == "consan":
        env |= {"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
    else:
        limits = ["--error-exitcode", str(FOUND), "--print-limit", "1000"]
        command = ["compute-sanitizer", *TOOLS[tool], *limits, *command]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 * MINUTES)
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, text = 124, f"took over {MINUTES} minutes\n{error.stdout or ''}"
    (log / f"{name}-{tool}.txt").write_text(text)
    good, said = code == 0, told(text)
    if tool == "racecheck" and code in (0, FOUND):  # warnings leave the exit code as it is
        found, allowed = races(text), dispatch()
        ours = [race for race in found if not race or not race <= allowed]
        good = "RACECHECK SUMMARY" in text and not ours and bool(found) == (code == FOUND)
        said += f", {len(found) - len(ours)} of Triton's dispatch" if found else ""
    verdict = "nothing" if good else f"FOUND ({code})"
    print(f"{name:<26} {tool:<10} {verdict:<12} {said}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--tools", default="memcheck,racecheck,consan", help="default: %(default)s")
    parser.add_argument("--logs", type=Path, help="folder for what the tools say (default: a temporary one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--inside", metavar="CASE", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return run(given.inside)
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}")
    tools = given.tools.split(",")
    if not {"memcheck", "racecheck"}.isdisjoint(tools) and shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not in PATH: it comes with the CUDA toolkit")
    log = given.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    log.mkdir(parents=True, exist_ok=True)
    has_consan = hasattr(triton.knobs.compilation, "instrumentation_mode")
    wanted = [
        (name, tool)
        for name in given.cases or CASES
        for tool in tools
        if tool != "consan"
        or (has_consan and CASES[name].family == "warpgroups" and not name.startswith("pairs"))
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        bad = sum(not good for good in pool.map(lambda one: checked(*one, log), wanted))
    print(f"{bad} of these found something; what the tools said is in {log}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
