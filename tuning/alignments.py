"""Time tritile beside torch where rows of a, b and the result start on 2, 4, 8 and 16 bytes, mixed.

    python tuning/alignments.py              # prints a table, keeps lines in results/<gpu>/alignments.json
    python tuning/alignments.py --only TN    # cases by name: "2048x2048x2048 TN bfloat16 16/8/4"

A model's sizes give each operand one alignment. torch.compile mixes alignments: it pads rows of its own
tensors to 16 bytes, and leaves weights and their gradients as they are. Measured are the products that it
makes of a model with rows of 1500 and 4001 (`COMPILED`), and other mixtures spread over sizes and layouts
(`spread`). Gaps between rows give the alignments that sizes do not. Both sides run by turns in CUDA graphs on
cold operands, as in `tritile bench`, with the config that a call would use now. Kernels are compiled first,
in parallel. All takes about two minutes on an H200.

A line has `op` ("alignments"), `problem` as `core.problem.problem_to_dict` writes it, `tritile_us` and
`torch_us` (medians), `spread` of tritile's times, `config`, `plan_source`, `error` and `torch_error`, and
`env` as in other results. Each is kept at once, and replaces an older one of the same problem and GPU.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tritile.core import device
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, problem_from_dict, problem_to_dict
from tritile.errors import brief
from tritile.lab.report import bench
from tritile.lab.report.environment import environment
from tritile.lab.report.results import Measurement
from tritile.planning import plans
from tritile.tune.measure.pool import CompilePool
from tritile.tune.subject.problem import ProblemSubject
from tritile.tune.suites import Case

HERE = Path(__file__).parent
OP = "alignments"
BYTES = (2, 4, 8, 16)
LAYOUTS = ("NT", "NN", "TN")  # forward; the gradient of what is multiplied; that of a weight
SIZES = (
    (4096, 1500, 1500), (4096, 4001, 1500), (4096, 1500, 4001), (4096, 500, 1500), (1500, 4001, 4096),
    (512, 1500, 1500), (128, 4096, 4096), (64, 4001, 1500), (16, 4001, 1500), (16, 1500, 1500),
    (2048, 2048, 2048), (8192, 63, 1025),
    (128, 1500, 1500), (128, 4001, 1500), (256, 1500, 4001), (256, 4096, 4096),
)  # fmt: skip
# m, n, k, layout, and on how many bytes rows of a, b and the result start.
COMPILED = (
    (4096, 1500, 1500, "NT", (16, 8, 16)), (4096, 500, 1500, "NT", (16, 8, 8)),
    (4096, 4001, 1500, "NT", (16, 8, 16)), (4096, 1500, 4001, "NT", (16, 2, 16)),
    (4096, 1500, 1500, "NN", (16, 8, 16)), (4096, 1500, 500, "NN", (8, 8, 16)),
    (4096, 1500, 4001, "NN", (16, 8, 16)), (4096, 4001, 1500, "NN", (16, 2, 16)),
    (1500, 1500, 4096, "TN", (16, 16, 8)), (500, 1500, 4096, "TN", (8, 16, 8)),
    (4001, 1500, 4096, "TN", (16, 16, 8)), (1500, 4001, 4096, "TN", (16, 16, 2)),
)  # fmt: skip
IN_HALF = 4  # of these are measured in float16 too
EACH = 3  # mixtures of each least alignment for each size, one in each layout
Row = dict[str, Any]
Alignments = tuple[int, int, int]


@dataclass(frozen=True)
class Mixed(Case):
    """Pose a product whose rows (columns if stored by columns) of a, b and out start on just these bytes."""

    aligns: Alignments = (16, 16, 16)

    @property
    def problem(self) -> MatmulProblem:
        """Return the problem of such tensors; rows have gaps where sizes give another alignment."""
        dense = super().problem
        assert isinstance(dense, MatmulProblem)
        a, b, out = self.aligns
        return replace(dense, a_align=a, b_align=b, out_align=out)

    @property
    def name(self) -> str:
        """Return the name that --only matches."""
        return f"{self.problem.label} {'/'.join(map(str, self.aligns))}"


def mixtures(least: int) -> list[Alignments]:
    """Return all mixtures whose least aligned operand starts on `least` bytes, except 16 everywhere.

    Operands and result change together, so that a few in a row vary both. As their counts have no common
    divisor, each mixture comes once.
    """
    pairs = [pair for pair in itertools.product(BYTES, repeat=2) if min(pair) == least]
    outs = [out for out in BYTES if min(least, out) < 16]
    numbers = range(len(pairs) * len(outs))
    return [(*pairs[number % len(pairs)], outs[number % len(outs)]) for number in numbers]


def mixed(m: int, n: int, k: int, layout: str, aligns: Alignments, dtype: str = "bfloat16") -> Mixed:
    """Return the case of a product."""
    return Mixed(OP, "matmul", dtype, layout, 1, m, n, k, aligns=aligns)


def spread() -> Iterator[Mixed]:
    """Yield mixtures of each least alignment for each size and layout, going on from size to size."""
    for number, size in enumerate(SIZES):
        for least in BYTES:
            known = mixtures(least)
            rounds = number * EACH // len(known)  # mixtures that come again have another layout
            for place in range(EACH):
                aligns = known[(number * EACH + place) % len(known)]
                yield mixed(*size, LAYOUTS[(place + rounds) % len(LAYOUTS)], aligns)


def grid() -> list[Mixed]:
    """Return all cases to measure, each once."""
    posed = [mixed(*case) for case in COMPILED]
    half = [mixed(*case, "float16") for case in COMPILED[:IN_HALF]]
    return list(dict.fromkeys([*posed, *half, *spread()]))


def compile_all(cases: list[Mixed], gpu: Device) -> None:
    """Fill Triton's cache with what will be timed. A kernel that does not compile fails when it is called.

    Planning takes a tenth of a second a case and overlaps with compiling.
    """
    with CompilePool() as pool:
        futures = []
        for case in cases:
            chosen = plans.plan_for(case.problem, gpu, "cached")
            assert chosen is not None
            futures.append(pool.submit(ProblemSubject(case.problem, gpu).compile, chosen.config))
        for future in futures:
            future.exception()


def line_of(case: Mixed, measured: Measurement, env: dict[str, str]) -> Row:
    """Return the line that is kept of a measurement."""
    names = ("tritile_us", "torch_us", "spread", "error", "torch_error")
    numbers = {name: float(f"{getattr(measured, name):.6g}") for name in names}
    line = {"op": OP, "problem": problem_to_dict(case.problem), **numbers}
    return line | {"config": measured.config.to_dict(), "plan_source": measured.plan_source, "env": env}


def keep(path: Path, line: Row) -> None:
    """Write a line to the list in a file, replacing an older one of the same problem and GPU."""

    def subject(row: Row) -> tuple[str, str]:
        return json.dumps(row["problem"], sort_keys=True), row["env"]["gpu"]

    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = {subject(row): row for row in [*known, line]}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(row, allow_nan=False) for row in found.values())
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def ratio(line: Row) -> float:
    """Return torch's time by tritile's."""
    return line["torch_us"] / line["tritile_us"]


def groups_of(lines: list[Row]) -> dict[tuple[int, int], list[Row]]:
    """Group lines, slowest first, by the least alignment of a and b and by that of the result, 0 for any."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for line in sorted(lines, key=ratio):
        problem = line["problem"]
        least = min(problem["a_align"], problem["b_align"])
        for out in (0, problem["out_align"]):
            groups.setdefault((least, out), []).append(line)
    return dict(sorted(groups.items()))


def table_of(lines: list[Row]) -> Table:
    """Tabulate ratios by alignment class."""
    table = Table("a, b", "result", title="torch's time by tritile's", title_justify="left")
    for name in ("count", "least", "mean", "most", "behind"):
        table.add_column(name, justify="right")
    table.add_column("the least one")
    for (least, out), some in groups_of(lines).items():
        ratios, worst = [ratio(line) for line in some], some[0]["problem"]
        numbers = (ratios[0], statistics.geometric_mean(ratios), ratios[-1])
        counts = (str(len(ratios)), *(f"{number:.2f}" for number in numbers), str(sum(r < 1 for r in ratios)))
        aligns = "/".join(str(worst[f"{side}_align"]) for side in ("a", "b", "out"))
        name = f"{problem_from_dict(worst).label} {aligns}, {some[0]['plan_source']}"
        table.add_row(str(least), str(out) if out else "any", *counts, name)
    return table


def main() -> int:
    """Measure on the current GPU; the exit status is 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE", help="where lines are kept")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name")
    given, gpu = parser.parse_args(), device.current_gpu()
    cases = [case for case in grid() if given.only in case.name]
    if gpu is None or not cases:
        print("no GPU here" if gpu is None else f"nothing has {given.only!r} in its name", file=sys.stderr)
        return 1
    start, env, lines = time.monotonic(), environment(gpu), []
    path = given.results or HERE / "results" / gpu.slug / f"{OP}.json"
    compile_all(cases, gpu)
    print(f"{time.monotonic() - start:.0f} s: compiled", flush=True)
    for case in cases:
        try:
            lines.append(line_of(case, bench.measured(case), env))
        except Exception as error:  # a case that raises, in torch too, costs itself alone
            print(f"{case.name}: {brief(error)}", file=sys.stderr)
            continue
        finally:
            torch.cuda.empty_cache()
        keep(path, lines[-1])
        print(f"{time.monotonic() - start:.0f} s: {case.name} {ratio(lines[-1]):.2f}", flush=True)
    Console(width=None if sys.stdout.isatty() else 150).print(table_of(lines))
    return int(len(lines) < len(cases))


if __name__ == "__main__":
    sys.exit(main())
