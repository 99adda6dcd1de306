"""Make the rows of docs/benchmarks.md about products and permutations on an H200."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmark_tables import Cells, span
from tritile.core.device import target_device
from tritile.lab.report.results import HOST, Result, case_of
from tritile.lab.report.summary import geomean, sizes_label

HERE = Path(__file__).parent
DEVICE = target_device("nvidia-h200")
RESULTS = HERE / "results" / DEVICE.slug
DRAWN = "unseen"
PLAIN = ("batched", "deep", "llama", "llm", "permute", "ragged", "square", "transpose")
ALIGNED = ("square", "llm", "deep", "batched")
EXTENTS = ("m", "n", "k")
THIN = 128  # the largest extent of a thin permutation
HEAD = "suite | dtype | layout | problems: | geometric mean: | under 1: | worst: | at"
SPAN_HEAD = "figure | least: | most: | geometric mean: | problems:"
Kind = tuple[str, str, str]  # suite, dtype and layout, as a row names them
Case = tuple[Kind, float, str]  # its row, torch's time by tritile's, and its sizes
Wanted = Callable[[Result], bool]
Spans = tuple[tuple[str, str, Wanted], ...]  # what a row names, the field of a line, which lines


def drawn_kind(line: Result) -> Kind:
    """Return the row of a product or permutation of drawn sizes."""
    if line["op"] == "permute":
        return "drawn, permutations", "1 to 16 bytes", ""
    ragged = any(line[extent] % 8 for extent in ("n", "k"))
    return f"drawn, {'ragged' if ragged else 'aligned'}", line["dtype"], "NN, NT"


def _plain_kind(line: Result) -> Kind:
    """Return the row of a plain operation of tuned sizes."""
    if line["suite"] == "llama":
        ragged = any(line[extent] > 1 and line[extent] % 8 for extent in EXTENTS)
        return f"llama, {'ragged' if ragged else 'aligned'}", line["dtype"], "NN, NT, TN"
    return line["suite"], line["dtype"], line["layout"] or ""


def _other_kind(line: Result) -> Kind:
    """Return the row of another type, or of a fused operation."""
    suite, dtype, precision, layout = (line[name] for name in ("suite", "dtype", "precision", "layout"))
    if suite == "weights":
        rows = "up to 16 rows" if line["m"] <= 16 else "256 and 4096 rows"
        return f"weights, {rows}", f"bfloat16 by {layout}", ""
    if suite == "scaled":
        ways = ("to int32", "with scales") if dtype == "int8" else ("by tensor, by row, none", "by 128 of K")
        scaled = line.get("epilogue") if dtype == "int8" else line.get("block_scales")
        fast = ", fast sums" if precision == "fast" else ""
        return suite, f"{dtype.split('_')[0]}, {ways[bool(scaled)]}{fast}", layout
    if suite == "complex":
        return suite, f"{dtype} {precision}", "NN, NT"
    if suite in ("fp32", "fp64"):
        return suite, dtype if precision == "ieee" else precision, layout
    return suite, f"{dtype.split('_')[0]}{', K shared' if line.get('ragged') == 'k' else ''}", layout


def any_kind(line: Result) -> Kind:
    """Return the row of a line of any suite."""
    if line["suite"] == DRAWN:
        return drawn_kind(line)
    return _plain_kind(line) if line["suite"] in PLAIN else _other_kind(line)


def invariance() -> list[dict[str, Any]]:
    """Return the newest lines of `tuning/invariance.py` that hold times."""
    lines = [json.loads(line) for line in (RESULTS / "invariance.jsonl").read_text().splitlines()]
    timed = {tuple(line[name] for name in ("weight", *EXTENTS)): line for line in lines if "cost" in line}
    return list(timed.values())


def one_by_one() -> str:
    """Say that lines of invariance were timed launch by launch where any was."""
    older = any("samples" not in line for line in invariance())
    return '"invariance" is of an older tritile, timed launch by launch, with its host time.\n' * older


def told_of_others(lines: list[Result]) -> str:
    """Say how many of the other types' lines are older, and how many problems were not tuned."""
    untuned, older = (sum(line["plan_source"] == "model" for line in lines),
                      sum("torch_call" not in line for line in lines))  # fmt: skip
    before = f"{older} lines are older, and have the first of these ways alone. " if older else ""
    return f"{before}All but {untuned} of these {len(lines)} problems were tuned."


def tuned() -> set[tuple[int, ...]]:
    """Return M, N and K of the plain bf16 products in NT that the shipped table holds."""
    path = HERE.parent / "tritile" / "tables" / f"{DEVICE.slug}.json"
    problems = [entry["problem"] for entry in json.loads(path.read_text())["entries"]]
    wanted = {"op": "matmul", "dtype": "bfloat16", "a_layout": "row", "b_layout": "column", "batch": 1}
    plain = [
        p for p in problems if wanted.items() <= p.items() and not (p.keys() & {"epilogue", "invariant"})
    ]
    return {tuple(problem[extent] for extent in EXTENTS) for problem in plain}


def by_table() -> list[Case]:
    """Return the cases of one weight by 19 numbers of rows; the kind says whether the table has the size."""
    known, cases = tuned(), []
    for line in invariance():
        sizes = tuple(line[extent] for extent in EXTENTS)
        if line["weight"] == "bfloat16":
            which = "tuned" if sizes in known else "untuned"
            ratio = line["torch_us"] / line["default_us"]
            cases.append(((f"invariance, {which}", "bfloat16", "NT"), ratio, "x".join(map(str, sizes))))
    return cases


def figures_of(found: Iterable[tuple[float, str]]) -> Cells:
    """Return the number of ratios, their geometric mean, how many are under 1, the worst and its place."""
    found = list(found)
    ratios = [ratio for ratio, _ in found]
    worst, at = min(found)
    under = sum(ratio < 1 for ratio in ratios)
    return str(len(ratios)), f"{geomean(ratios):.2f}", str(under), f"{worst:.2f}", at


def by_kind(cases: Iterable[Case]) -> dict[Kind, list[tuple[float, str]]]:
    """Return ratios with their places, by kind."""
    kinds: dict[Kind, list[tuple[float, str]]] = {}
    for kind, ratio, at in cases:
        kinds.setdefault(kind, []).append((ratio, at))
    return kinds


def rows(cases: Iterable[Case]) -> list[Cells]:
    """Return a row for each kind, in order."""
    return [(*kind, *figures_of(found)) for kind, found in sorted(by_kind(cases).items())]


def _cases(lines: Iterable[Result]) -> list[Case]:
    return [(any_kind(line), line["ratio_torch"], sizes_label(line)) for line in lines]


def untuned_rows(cases: list[Result]) -> list[Cells]:
    """Return the rows of sizes whose configs were predicted, and of one weight's tuned sizes beside them."""
    drawn = [line for line in cases if line["suite"] == DRAWN]
    return [*rows(_cases(drawn)), *rows(by_table())]


def plain_rows(cases: list[Result]) -> list[Cells]:
    """Return the rows of plain operations at tuned sizes."""
    return rows(_cases(line for line in cases if line["suite"] in PLAIN))


def other_rows(cases: list[Result]) -> list[Cells]:
    """Return the rows of other types and of fused operations."""
    return rows(_cases(line for line in cases if line["suite"] not in (*PLAIN, DRAWN)))


def _least(line: Result) -> int:
    return min(line[extent] for extent in EXTENTS)


def short(line: Result, *suites: str) -> bool:
    return line["suite"] in suites and line["dtype"] in ("float16", "bfloat16")


def of(line: Result, suite: str, precision: str) -> bool:
    return line["suite"] == suite and line["precision"] == precision


def _ragged32(line: Result, precision: str) -> bool:
    ragged = line["suite"] == "fp32" and any(line[extent] % 2 for extent in EXTENTS)
    return ragged and line["precision"] == precision and _least(line) >= 2047


def is_fp32(line: Result) -> bool:
    return line["suite"] in ("square", "ragged") and line["dtype"] == "float32"


def _ozaki(line: Result, least: int, most: float) -> bool:
    return of(line, "fp64", "ozaki") and _least(line) >= least and max(line["m"], line["n"]) <= most


def _grouped(line: Result) -> bool:
    return line["op"] == "grouped" and line["ragged"] == "m" and line["dtype"] == "bfloat16"


def _drawn(starts: tuple[int, ...], least: float, most: float, line: Result) -> bool:
    """Return whether a line is a drawn aligned product with such a time in us and such row alignments."""
    if line["suite"] != DRAWN or line["op"] != "matmul" or line["n"] % 8 or line["k"] % 8:
        return False
    rows = line["k"], line["n" if line["layout"] == "NN" else "k"]
    return math.gcd(*(2 * row for row in rows), 128) in starts and least <= line["tritile_us"] < most


DRAWN_SPANS: Final[Spans] = tuple(
    (f"rows start on {on}, {time}", "ratio_torch", functools.partial(_drawn, starts, least, most))
    for on, starts in (("16 bytes and not 32", (16,)), ("32 bytes or more", (32, 64, 128)))
    for time, least, most in (
        ("60 us and longer", 60, math.inf), ("12 to 60 us", 12, 60), ("under 12 us", 0, 12)
    )
)  # fmt: skip
PLAIN_SPANS: Final[Spans] = (
    ("aligned, all", "ratio_torch", lambda x: short(x, *ALIGNED)),
    ("square, 256 and 512", "ratio_torch", lambda x: short(x, "square") and x["m"] <= 512),
    ("square, 768 and 1024", "ratio_torch", lambda x: short(x, "square") and x["m"] in (768, 1024)),
    ("square, 1536", "ratio_torch", lambda x: short(x, "square") and x["m"] == 1536),
    ("square, 2048 and larger", "ratio_torch", lambda x: short(x, "square") and x["m"] >= 2048),
    ("square, 8192, TFLOP/s", "tflops", lambda x: short(x, "square") and x["m"] == 8192),
    ("ragged, all", "ratio_torch", lambda x: short(x, "ragged")),
    ("ragged, 2047 and larger, baseline max-autotune", "ratio_inductor",
     lambda x: short(x, "ragged") and _least(x) >= 2047),
    ("ragged, smaller or thin, baseline max-autotune", "ratio_inductor",
     lambda x: short(x, "ragged") and _least(x) < 2047),
    ("ragged, baseline Triton's tutorial kernel", "ratio_tutorial", lambda x: short(x, "ragged")),
)  # fmt: skip
OTHER_SPANS: Final[Spans] = (
    ("fp32 ieee, 768 and larger", "ratio_torch", lambda x: is_fp32(x) and max(x["m"], x["k"]) >= 768),
    ("fp32 ieee, relative error", "error", is_fp32),
    ("fp32 ieee, torch's relative error", "torch_error", is_fp32),
    ("fp32 fp16x3, 4096 and larger", "ratio_torch",
     lambda x: of(x, "fp32", "fp16x3") and _least(x) >= 4096),
    ("fp32 fp16x3, odd sizes, 2047 and larger", "ratio_torch", lambda x: _ragged32(x, "fp16x3")),
    ("fp32 tf32, odd sizes, 2047 and larger", "ratio_torch", lambda x: _ragged32(x, "tf32")),
    ("fp64 ozaki, 1024 and 2048", "ratio_torch", lambda x: _ozaki(x, 0, 2048)),
    ("fp64 ozaki, 4095 and larger", "ratio_torch", lambda x: _ozaki(x, 4093, math.inf)),
    ("fp64 ozaki, 16384x16384x1024", "ratio_torch", lambda x: _ozaki(x, 1024, math.inf) and x["k"] == 1024
     and x["m"] == 16384),
    ("fp8, scales by tensor, by row, none", "ratio_torch",
     lambda x: of(x, "scaled", "ieee") and x["dtype"] != "int8" and not x.get("block_scales")),
    ("int4 weights, groups of 128, up to 16 rows", "ratio_torch",
     lambda x: x["layout"] == "int4/128" and x["m"] <= 16),
    ("int4 weights, groups of 128, 256 rows", "ratio_torch",
     lambda x: x["layout"] == "int4/128" and x["m"] == 256),
    ("int4 weights, groups of 128, 4096 rows", "ratio_torch",
     lambda x: x["layout"] == "int4/128" and x["m"] == 4096),
    ("bf16, 8 groups", "ratio_torch", lambda x: _grouped(x) and x["batch"] == 8),
    ("bf16, 32 groups and more", "ratio_torch", lambda x: _grouped(x) and x["batch"] > 8),
    ("epilogues of 4096x4096x4096, baseline max-autotune", "ratio_inductor",
     lambda x: x["suite"] == "epilogue"),
)  # fmt: skip


def spans(cases: list[Result], wanted: Spans) -> Iterator[Cells]:
    """Return a row for each span: the least, the most and the geometric mean of its lines' figures."""
    for name, field, is_wanted in wanted:
        yield name, *span(line[field] for line in cases if is_wanted(line) and line.get(field) is not None)


def below(cases: list[Result]) -> str:
    """Return how many aligned 16-bit products are slower than torch, and how many by more than 3%."""
    ratios = [line["ratio_torch"] for line in cases if short(line, *ALIGNED)]
    slower, clearly = (sum(ratio < bound for ratio in ratios) for bound in (1, 0.97))
    return f"Of {len(ratios)} aligned products in 16 bits {slower} are under 1, and {clearly} under 0.97."


def cubes(cases: list[Result]) -> Iterator[Cells]:
    """Return the time of 8191^3 by that of 8192^3, for each dtype and layout."""
    found = {
        (line["m"], line["dtype"], line["layout"]): line["tritile_us"]
        for line in cases
        if short(line, "square", "ragged") and _least(line) == max(line[extent] for extent in EXTENTS)
    }
    for size, dtype, layout in found:
        if size == 8191:
            yield dtype, layout, f"{found[8191, dtype, layout] / found[8192, dtype, layout]:.3f}"


def tuned_permutations(cases: list[Result]) -> list[Result]:
    return [line for line in cases if line["op"] == "permute" and line["suite"] != DRAWN]


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


def permutations(cases: list[Result]) -> Iterator[Cells]:
    """Return rates of permutations by that of one large copy, and by that of a copy of as many bytes."""
    kinds: dict[str, list[Result]] = {}
    for line in tuned_permutations(cases):
        kinds.setdefault(kind_of(line), []).append(line)
    for kind, found in kinds.items():
        own = [(line["gbps"] / line["copy_gbps"], sizes_label(line)) for line in found]
        worst, at = min(own)
        large = geomean(line["gbps"] for line in found) / large_copy_gbps(cases)
        means = f"{large:.2f}", f"{geomean(ratio for ratio, _ in own):.2f}"
        yield kind, str(len(found)), *means, f"{worst:.2f}", at


def large_copy_gbps(cases: list[Result]) -> float:
    """Return the rate of a copy of 8192x8192 elements of bfloat16."""
    return next(
        line["copy_gbps"]
        for line in tuned_permutations(cases)
        if line["shape"] == [8192, 8192] and line["dtype"] == "bfloat16"
    )


def transposes(cases: list[Result]) -> Iterator[Cells]:
    """Return the times of a small and of a large odd transpose, by dtype."""
    for line in tuned_permutations(cases):
        if line["shape"] in ([512, 512], [8191, 8193]):
            times = f"{line['tritile_us']:.2f}", f"{line['torch_us']:.2f}"
            yield sizes_label(line), line["dtype"], *times, f"{line['gbps'] / large_copy_gbps(cases):.2f}"


def costs_of_invariance() -> Iterator[Cells]:
    """Return the time of batch-invariant products by the default's, by weight."""
    for weight in ("bfloat16", "int4"):
        yield weight, *span(line["cost"] for line in invariance() if line["weight"] == weight)


def host_costs(lines: list[Result]) -> Iterator[Cells]:
    """Return torch's host time by tritile's, by call."""
    found = [line for line in lines if line["op"] == HOST]
    for call in dict.fromkeys(line["call"] for line in found):
        yield f"`{call}`", *span(line["ratio_torch"] for line in found if line["call"] == call)
