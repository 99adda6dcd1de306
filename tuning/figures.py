"""Print the tables and figures that README.md tells, from the committed lines: python tuning/figures.py

The lines are results/<gpu>/*.jsonl and the trials in trials/, of an H200. A test compares the tables with
README.md: paste what this prints there when the lines change. A name that ends with a peer tells the peer's
time by tritile's. docs/benchmarks.md, which a test compares too, is written whole (`benchmarks.py`).
"""

import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import benchmarks
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.lab.report import recorded
from tritile.lab.report.results import HOST, Result, case_of
from tritile.lab.report.run import stored
from tritile.lab.report.summary import geomean, of_cases, sizes_label
from tritile.planning import model

HERE = Path(__file__).parent
DEVICE = target_device("nvidia-h200")
RESULTS = HERE / "results" / DEVICE.slug
DRAWN = "unseen"
FIRST = ("batched", "deep", "llama", "llm", "permute", "ragged", "square", "transpose")  # of the first table
ALIGNED = ("square", "llm", "deep", "batched")
EXTENTS = ("m", "n", "k")
THIN = 128  # the largest extent of a thin permutation
HEAD = "| suite | dtype | layout | problems | geometric mean | under 1 | worst | at |"
RULE = "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
Kind = tuple[str, str, str]  # suite, dtype and layout, as a row names them
Case = tuple[Kind, float, str]  # its row, torch's time by tritile's, and its sizes


def first_kind(line: Result) -> Kind:
    """The row of the first table that a line belongs to."""
    if line["suite"] == "llama":
        odd = any(line[extent] > 1 and line[extent] % 8 for extent in EXTENTS)
        return f"llama, {'odd' if odd else 'even'} sizes", line["dtype"], "NN, NT, TN"
    if line["suite"] == DRAWN and line["op"] == "permute":
        return "unseen, **untuned** sizes, permutations", "1 to 16 bytes", ""
    if line["suite"] == DRAWN:
        odd = any(line[extent] % 8 for extent in ("n", "k"))
        return f"unseen, **untuned** sizes, {'odd' if odd else 'even'}", line["dtype"], "NN, NT"
    return line["suite"], line["dtype"], line["layout"] or ""


def second_kind(line: Result) -> Kind:
    """The row of the second table that a line belongs to."""
    suite, dtype, precision, layout = (line[name] for name in ("suite", "dtype", "precision", "layout"))
    if suite == "weights":
        rows = "up to 16 rows" if line["m"] <= 16 else "256 and 4096 rows"
        return f"weights, {rows}", f"bfloat16 by {layout}", ""
    if suite == "scaled":
        ways = ("to int32", "with scales") if dtype == "int8" else ("by tensor, by row, none", "by 128 of K")
        scaled = line.get("epilogue") if dtype == "int8" else line.get("block_scales")
        return suite, f"{dtype.split('_')[0]}, {ways[bool(scaled)]}", layout
    if suite == "complex":
        return suite, f"{dtype} {precision}", "NN, NT"
    if suite in ("fp32", "fp64"):
        return suite, dtype if precision == "ieee" else precision, layout
    return suite, f"{dtype.split('_')[0]}{', K shared' if line.get('ragged') == 'k' else ''}", layout


def invariance() -> list[dict[str, Any]]:
    """The lines of `tuning/invariance.py` that hold times."""
    lines = [json.loads(line) for line in (RESULTS / "invariance.jsonl").read_text().splitlines()]
    return [line for line in lines if "cost" in line]


def tuned() -> set[tuple[int, ...]]:
    """M, N and K of the plain bf16 products in NT that the shipped table holds."""
    path = HERE.parent / "tritile" / "tables" / f"{DEVICE.slug}.json"
    problems = [entry["problem"] for entry in json.loads(path.read_text())["entries"]]
    wanted = {"op": "matmul", "dtype": "bfloat16", "a_layout": "row", "b_layout": "column", "batch": 1}
    plain = [
        p for p in problems if wanted.items() <= p.items() and not (p.keys() & {"epilogue", "invariant"})
    ]
    return {tuple(problem[extent] for extent in EXTENTS) for problem in plain}


def by_table() -> list[Case]:
    """Products of one weight by 19 numbers of rows, apart by whether the size is in the shipped table."""
    known, cases = tuned(), []
    for line in invariance():
        sizes = tuple(line[extent] for extent in EXTENTS)
        if line["weight"] == "bfloat16":
            which = "tuned" if sizes in known else "**untuned**"
            ratio = line["torch_us"] / line["default_us"]
            cases.append(((f"invariance, {which} sizes", "bfloat16", "NT"), ratio, "x".join(map(str, sizes))))
    return cases


def mixed() -> list[Case]:
    """Products of `tuning/alignments.py` whose configs were predicted."""
    lines = json.loads((RESULTS / "alignments.json").read_text())
    kind = "alignments, **untuned** sizes", "bfloat16, float16", "NN, NT, TN"
    untuned = [line for line in lines if line["plan_source"] in ("model", "near")]
    sizes = ["x".join(str(line["problem"][extent]) for extent in EXTENTS) for line in untuned]
    ratios = [line["torch_us"] / line["tritile_us"] for line in untuned]
    return [(kind, ratio, at) for ratio, at in zip(ratios, sizes, strict=True)]


def rows(cases: Iterable[Case]) -> list[str]:
    """A row for each kind, in order: how many, the geometric mean, how many are under 1, and the worst."""
    kinds: dict[Kind, list[tuple[float, str]]] = {}
    for kind, ratio, at in cases:
        kinds.setdefault(kind, []).append((ratio, at))
    made = []
    for kind, found in sorted(kinds.items()):
        ratios = [ratio for ratio, _ in found]
        worst, at = min(found)
        under = sum(ratio < 1 for ratio in ratios)
        cells = (*kind, len(ratios), f"{geomean(ratios):.2f}", under, f"{worst:.2f}", at)
        made.append(f"| {' | '.join(map(str, cells))} |")
    return made


def tables(lines: Iterable[Result]) -> list[list[str]]:
    """The rows of both tables of README.md."""
    lines = of_cases(lines)
    drawn = [line for line in lines if line["suite"] == DRAWN]
    first = [line for line in lines if line["suite"] in FIRST]
    second = [line for line in lines if line["suite"] not in (*FIRST, DRAWN)]
    pairs = ((drawn, first_kind), (first, first_kind), (second, second_kind))
    made = [rows((kind(x), x["ratio_torch"], sizes_label(x)) for x in found) for found, kind in pairs]
    return [[*made[0], *rows(by_table()), *rows(mixed()), *made[1]], made[2]]


def _least(line: Result) -> int:
    return min(line[extent] for extent in EXTENTS)


def _short(line: Result, *suites: str) -> bool:
    return line["suite"] in suites and line["dtype"] in ("float16", "bfloat16")


def _of(line: Result, suite: str, precision: str) -> bool:
    return line["suite"] == suite and line["precision"] == precision


def _odd32(line: Result, precision: str) -> bool:
    odd = line["suite"] == "fp32" and any(line[extent] % 2 for extent in EXTENTS)
    return odd and line["precision"] == precision and _least(line) >= 2047


def _is_fp32(line: Result) -> bool:
    return line["suite"] in ("square", "ragged") and line["dtype"] == "float32"


def _grouped(line: Result) -> bool:
    return line["op"] == "grouped" and line["ragged"] == "m" and line["dtype"] == "bfloat16"


def _drawn(starts: tuple[int, ...], least: float, most: float, line: Result) -> bool:
    """Whether it is a drawn aligned product of so many microseconds, with rows on one of these bytes."""
    if line["suite"] != "unseen" or line["op"] != "matmul" or line["n"] % 8 or line["k"] % 8:
        return False
    rows = line["k"], line["n" if line["layout"] == "NN" else "k"]
    return math.gcd(*(2 * row for row in rows), 128) in starts and least <= line["tritile_us"] < most


Wanted = Callable[[Result], bool]
SPANS: Final[tuple[tuple[str, str, Wanted], ...]] = (
    ("square to 512, torch", "ratio_torch", lambda x: _short(x, "square") and x["m"] <= 512),
    ("square 768 and 1024, torch", "ratio_torch", lambda x: _short(x, "square") and x["m"] in (768, 1024)),
    ("square 1536, torch", "ratio_torch", lambda x: _short(x, "square") and x["m"] == 1536),
    ("square from 2048, torch", "ratio_torch", lambda x: _short(x, "square") and x["m"] >= 2048),
    ("square 8192, TFLOP/s", "tflops", lambda x: _short(x, "square") and x["m"] == 8192),
    ("odd, torch", "ratio_torch", lambda x: _short(x, "ragged")),
    ("odd from 2047, max-autotune", "ratio_inductor", lambda x: _short(x, "ragged") and _least(x) >= 2047),
    ("odd below, max-autotune", "ratio_inductor", lambda x: _short(x, "ragged") and _least(x) < 2047),
    ("odd, tutorial", "ratio_tutorial", lambda x: _short(x, "ragged")),
    ("fp32 from 768, torch", "ratio_torch", lambda x: _is_fp32(x) and max(x["m"], x["k"]) >= 768),
    ("fp32, error", "error", _is_fp32),
    ("fp32, torch's error", "torch_error", _is_fp32),
    ("fp16x3 from 4096, torch", "ratio_torch", lambda x: _of(x, "fp32", "fp16x3") and _least(x) >= 4096),
    ("fp16x3 odd from 2047, torch", "ratio_torch", lambda x: _odd32(x, "fp16x3")),
    ("tf32 odd from 2047, torch", "ratio_torch", lambda x: _odd32(x, "tf32")),
    ("ozaki from 8191, torch", "ratio_torch", lambda x: _of(x, "fp64", "ozaki") and _least(x) >= 8191),
    ("int4/128 to 16 rows, torch", "ratio_torch", lambda x: x["layout"] == "int4/128" and x["m"] <= 16),
    ("int4/128 at 256 rows, torch", "ratio_torch", lambda x: x["layout"] == "int4/128" and x["m"] == 256),
    ("int4/128 at 4096 rows, torch", "ratio_torch", lambda x: x["layout"] == "int4/128" and x["m"] == 4096),
    ("8 groups, torch", "ratio_torch", lambda x: _grouped(x) and x["batch"] == 8),
    ("32 groups and more, torch", "ratio_torch", lambda x: _grouped(x) and x["batch"] > 8),
    ("epilogues, max-autotune", "ratio_inductor", lambda x: x["suite"] == "epilogue"),
    ("permutations, torch", "ratio_torch", lambda x: x["op"] == "permute"),
    *(
        (f"unseen, rows on {on}, {low} to {high} us", "ratio_torch", functools.partial(_drawn, at, low, high))
        for on, at in (("16 bytes and not 32", (16,)), ("32 bytes and more", (32, 64, 128)))
        for low, high in ((60, math.inf), (12, 60), (0, 12))
    ),
)  # fmt: skip


def _span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.3g} to {max(values):.3g}, geometric mean {geomean(values):.3g} of {len(values)}"


def figures(lines: list[Result]) -> Iterator[tuple[str, str]]:
    """What the text tells besides the tables, by name."""
    cases = of_cases(lines)
    aligned = [line["ratio_torch"] for line in cases if _short(line, *ALIGNED)]
    for bound in (0.97, 1):
        yield f"aligned under {bound}", f"{sum(ratio < bound for ratio in aligned)} of {len(aligned)}"
    for name, field, wanted in SPANS:
        yield name, _span(line[field] for line in cases if wanted(line) and line[field] is not None)
    cubes = {
        (line["m"], line["dtype"], line["layout"]): line["tritile_us"]
        for line in cases
        if _short(line, "square", "ragged") and _least(line) == max(line[extent] for extent in EXTENTS)
    }
    for size, *kind in cubes:
        if size == 8191:
            yield f"time of 8191^3 by 8192^3, {kind}", f"{cubes[8191, *kind] / cubes[8192, *kind]:.3f}"
    yield "not tuned", f"{sum(line['plan_source'] == 'model' for line in cases)} of {len(cases)}"
    yield from _permutations([line for line in cases if line["op"] == "permute"])
    for name in ("bfloat16", "int4"):
        costs = [line["cost"] for line in invariance() if line["weight"] == name]
        yield f"batch_invariant by the default's time, {name}", _span(costs)
    for call in dict.fromkeys(line["call"] for line in lines if line["op"] == HOST):
        hosts = [line["ratio_torch"] for line in lines if line["op"] == HOST and line["call"] == call]
        yield f"host, {call}, torch", _span(hosts)


def kind_of(line: Result) -> str:
    """Return the kind of a permutation of x that fills 64 MiB, "small" of any other."""
    problem, shape = case_of(line).problem, line["shape"]
    if problem.bytes < 2**27:
        return "small"
    if len(shape) > 3 or min(problem.m, problem.n) <= THIN:
        return "thin shapes and rank 4 to 6"
    if problem.itemsize == 1:
        return "1-byte elements"
    return "odd sizes" if any(extent % 2 for extent in shape) else "even sizes"


def _permutations(lines: list[Result]) -> Iterator[tuple[str, str]]:
    """Rates of permutations by that of one large even copy, and the rates of copies of their own sizes."""
    kinds: dict[str, list[Result]] = {}
    for line in lines:
        kinds.setdefault(kind_of(line), []).append(line)
    large = [x for x in lines if x["shape"] == [8192, 8192] and x["dtype"] == "bfloat16"]
    even = large[0]["copy_gbps"]
    yield "copy of 8192x8192 bfloat16, GB/s", f"{even:.0f}"
    for kind, found in kinds.items():
        yield f"permutations, {kind}, by it", _span(line["gbps"] / even for line in found)
        yield f"their copies, {kind}, GB/s", _span(line["copy_gbps"] for line in found)
    for line in lines:
        if line["shape"] in ([512, 512], [8191, 8193]):
            times = f"{line['tritile_us']:.2f} us, torch {line['torch_us']:.2f}"
            yield f"{sizes_label(line)} {line['dtype']}", f"{times}, {line['gbps'] / even:.2f} of the copy"


def predictions() -> Iterator[tuple[str, str]]:
    """How far predicted times are off, in the median, by store and kind: of all trials, of the fastest."""
    for path in sorted((HERE / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz")):
        kinds: dict[str, tuple[list[float], list[float]]] = {}
        for (problem, _), times in recorded.times([path], DEVICE).items():
            kind = "products" if isinstance(problem, MatmulProblem) else "permutations"
            off = {one: abs(model.predict_us(one, problem, DEVICE) / us - 1) for one, us in times.items()}
            everything, fastest = kinds.setdefault(kind, ([], []))
            everything += off.values()
            fastest.append(off[min(times, key=lambda config, times=times: times[config])])
        for kind, (everything, fastest) in kinds.items():
            middle, best = statistics.median(everything), statistics.median(fastest)
            yield f"predicted, {path.name}, {kind}", f"off by {middle:.0%}, of the fastest by {best:.0%}"


def commits() -> int:
    """How many commits of tritile the committed lines come from."""
    folders = ("results", "accuracy", "ladder", "llama")
    texts = [path.read_text() for name in folders for path in (HERE / name).rglob("*.json*")]
    return len({found for text in texts for found in re.findall(r'"tritile": "([0-9a-f]{7})"', text)})


def main() -> None:
    """Write docs/benchmarks.md, and print both tables of README.md, then the figures."""
    benchmarks.write()
    lines = stored([RESULTS], print)
    for table in tables(lines):
        print("\n".join((HEAD, RULE, *table)), end="\n\n")
    for name, value in (*figures(lines), *predictions(), ("commits of the lines", str(commits()))):
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
