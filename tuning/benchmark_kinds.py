"""Sort the committed lines into the kinds of problem that the pages of benchmarks and README.md show."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean as geomean

import jinja2

import benchmark_drawn as drawn
from benchmark_results import case_of, of_cases, sizes_label, stored
from benchmark_tables import Cells, Line, Pair, by_time, latest, mean, pair, read, span, spread, starts
from tritile.core.device import target_device

HERE = Path(__file__).parent
DEVICE = target_device("nvidia-h200")
RESULTS = HERE / "results" / DEVICE.slug
DRAWN = "unseen"
PLAIN = ("batched", "deep", "large", "llama", "llm", "permute", "ragged", "square", "transpose")
ALIGNED = ("square", "llm", "deep", "batched")
EXTENTS = ("m", "n", "k")
THIN = 128  # the largest extent of a thin permutation
HEAD = "suite | dtype | layout | problems: | by time: | geometric mean: | under 1: | worst: | at"
SPAN_HEAD = "figure | least: | most: | geometric mean: | problems:"
SEARCHES_HEAD = (
    "problem | searches, s: | configs timed | winners, slower than the fastest: | predicted, slower:"
    " | fastest, us: | torch, us:"
)
ANSWERS_HEAD = "problems | GPU | is tritile faster? | how many: | by time: | mean: | 5%: | worst: | at"
EVEN = 0.05  # a ratio by time within this of 1 counts as equal
SLOWER = 0.99  # from one run to the next ratios of one kind differ by half as much
INVARIANT_HEAD = "products in bf16 | problems: | by time: | geometric mean: | under 1: | worst: | at"
LARGE_HEAD = "GPU | MxNxK | layout | cuBLAS: | a call: | tritile's own kernel:"
LOSSES_HEAD = f"GPU | do instead | {HEAD}"
Kind = tuple[str, str, str]  # suite, dtype and layout, as a row names them
Case = tuple[Kind, Pair]  # its row, and both times

TUNE = "Tune the sizes that you use (`tritile tune`), or call torch."
WIDE = "Unpack the weight once (`QuantizedWeight.dequantize`) and call torch, if memory allows."
# What a suite's name and a dtype begin with, then what to use; the first that fits counts.
ADVICE = (
    ("random, aligned", "", TUNE),
    ("one weight", "", TUNE),
    (
        "model",
        "",
        "Convert it in mode `tune`, which measures (`tritile tune --model`), or keep torch's layers.",
    ),
    ("fp64", "float64", "Call torch."),
    ("grouped", "float8", "Call `torch._scaled_grouped_mm`."),
    ("grouped", "", "Call `torch._grouped_mm`."),
    ("scaled", "", "Call `torch._scaled_mm`."),
    ("weights, 256", "", WIDE),
)
OTHERWISE = "Call torch."


def kind_of(line: Line) -> Kind:
    """Return the row of a line of any suite."""
    suite, dtype, precision, layout = (line[name] for name in ("suite", "dtype", "precision", "layout"))
    short, sides = dtype.split("_")[0], [line[extent] for extent in EXTENTS if extent in line]
    if suite == DRAWN and line["op"] == "permute":
        return "random, permutations", "1 to 16 bytes", ""
    if suite == DRAWN:
        return f"random, {'ragged' if any(x % 8 for x in sides[1:]) else 'aligned'}", dtype, "NN, NT"
    if suite == "llama":
        ragged = any(x > 1 and x % 8 for x in sides)
        return f"llama, {'ragged' if ragged else 'aligned'}", dtype, "NN, NT, TN"
    if suite in PLAIN:
        return suite, dtype, layout or ""
    if suite == "weights":
        rows = "up to 16 rows" if line["m"] <= 16 else "256 and 4096 rows"
        return f"weights, {rows}", f"bfloat16 by {layout}", ""
    if suite == "scaled":
        ways = ("to int32", "with scales") if dtype == "int8" else ("by tensor, by row, none",) * 2
        fast = ", fast sums" if precision == "fast" else ""
        return suite, f"{short}, {ways[bool(line.get('epilogue'))]}{fast}", layout
    if suite in ("fp32", "fp64"):
        return suite, dtype if precision == "ieee" else precision, layout
    return suite, short, layout


def permutation_kind(line: Line) -> str:
    """Return the kind of a permutation of x that fills 64 MiB, "small" of any other."""
    problem, shape = case_of(line).problem, line["shape"]
    if problem.bytes < 2**27:
        return "small"
    if len(shape) > 3 or min(problem.m, problem.n) <= THIN:
        return "thin shapes and rank 4 to 6"
    if problem.itemsize == 1:
        return "1-byte elements"
    return "odd sizes" if any(extent % 2 for extent in shape) else "even sizes"


def told(line: Line) -> Line:
    """Return a line with what conditions ask for.

    `kind` is its row's suite, `label` its sizes; `short` tells elements of 16 bits. Of a product, `least` and
    `most` are of its extents, and `starts` is the bytes that every row of bf16 operands starts on. Of a
    permutation, `copy_us` is the time of a copy of as many bytes.
    """
    more = {"kind": kind_of(line)[0], "label": sizes_label(line), "short": line["dtype"].endswith("float16")}
    if "k" in line:
        sides = [line[extent] for extent in EXTENTS]
        more |= {"least": min(sides), "most": max(sides), "starts": starts(line)}
    if line["op"] == "permute":
        more["copy_us"] = drawn.versus_copy(line).peer
    return line | more


def picked(cases: Iterable[Line], condition: str) -> list[Line]:
    """Return the lines, as `told` has them, for which an expression of jinja holds."""
    holds: Callable[..., object] = jinja2.Environment().compile_expression(condition)
    return [line for line in cases if holds(line, ALIGNED=ALIGNED, PLAIN=PLAIN)]


def spans(cases: list[Line], wanted: str) -> Iterator[Cells]:
    """Yield a row for each line of text: a name, the field that is spanned, and which lines count."""
    for text in wanted.strip().splitlines():
        name, field, condition = text.split(" | ")
        found = (line.get(field) for line in picked(cases, condition))
        yield name, *span(value for value in found if value is not None)


def pairs_of(cases: list[Line], text: str) -> tuple[str, list[Pair]]:
    """Return the name and the times of a line of text: a name, which lines count, and the fields compared.

    Without fields these are torch's time and tritile's as called.
    """
    name, condition, *fields = text.split(" | ")
    peer, own = fields or ("torch_us", "tritile_us")
    return name, [pair(line, peer, own, line["label"]) for line in picked(cases, condition)]


def summary(cases: list[Line], wanted: str) -> Iterator[Cells]:
    """Yield a row of README.md for each line of text: a name, and which lines count."""
    for text in wanted.strip().splitlines():
        name, pairs = pairs_of(cases, text)
        count, weighted, middle, low, _, worst, _ = spread(pairs, low=True)
        yield name, count, weighted, middle, low, worst


def answers(results: Path, wanted: str) -> Iterator[Cells]:
    """Yield whether a call is faster than torch for each line of text, as `pairs_of` reads it, on each GPU.

    Where others are compared, there is no such answer.
    """
    folders = sorted((path for path in results.iterdir() if path.is_dir()), reverse=True)
    of_gpus = [[told(line) for line in of_cases(stored([folder], print))] for folder in folders]
    for text in wanted.strip().splitlines():
        for cases in of_gpus:
            name, pairs = pairs_of(cases, text)
            if pairs:
                count, weighted, middle, low, _, *worst = spread(pairs, low=True)
                gpu = cases[0]["env"]["gpu"].split()[1]
                faster = "" if " | " in text.partition(" | ")[2] else answer(by_time(pairs))
                yield name, gpu, faster, count, weighted, middle, low, *worst


def answer(ratio: float) -> str:
    """Return in words how fast tritile is, by the time-weighted ratio."""
    if abs(ratio - 1) <= EVEN:
        return "about as fast"
    return "yes" if ratio > 1 else "no"


def invariance() -> list[float]:
    """Return times within batch invariance by those without, of the newest line of rows."""
    line = next(line for line in reversed(read(RESULTS / "rows.jsonl")) if "invariant_ratio_torch" in line)
    pairs = zip(line["ratio_torch"], line["invariant_ratio_torch"], strict=True)
    return [outside / within for outside, within in pairs]


def of_invariance(part: str) -> list[Line]:
    """Return the newest lines of a part of invariance.py; of drawn products those of the newest draw.

    Products that failed are left out.
    """
    lines = [line for line in read(RESULTS / "invariance.jsonl") if line["part"] == part]
    seeds = [line["env"]["seed"] for line in lines if line.get("suite") == "drawn"]
    newest = [line for line in lines if line.get("suite") != "drawn" or line["env"]["seed"] == seeds[-1]]
    return [x for x in latest(newest, ("suite", "what", "layout", *EXTENTS)) if "failed" not in x]


def invariant_pairs(lines: Iterable[Line], peer: str) -> dict[str, list[Pair]]:
    """Return times of batch-invariant products, and those of a peer, by suite."""
    suites: dict[str, list[Pair]] = {}
    for line in lines:
        suites.setdefault(line["suite"], []).append(pair(line, f"{peer}_us", at=sizes_label(line)))
    return suites


def invariant_rows(lines: Iterable[Line]) -> Iterator[Cells]:
    """Yield a row for each suite of batch-invariant products compared with torch."""
    for suite, pairs in invariant_pairs(lines, "torch").items():
        yield "random" if suite == "drawn" else suite, *spread(pairs)


def searches() -> list[Line]:
    """Return the newest run of searches."""
    lines = read(RESULTS / "searches.jsonl")
    return latest((line for line in lines if line["env"]["seed"] == lines[-1]["env"]["seed"]), ("problem",))


def of_searches(lines: Iterable[Line]) -> Iterator[Cells]:
    """Yield a row for each problem, then one of all."""

    def percent(values: Iterable[float | None]) -> str:
        return ", ".join("failed" if value is None else f"{value:.1%}" for value in values)

    for line in lines:
        seconds = ", ".join(f"{each:.1f}" for each in line["seconds"])
        times = f"{line['best_us']:.1f}", f"{line['torch_us']:.1f}" if line["torch_us"] else ""
        shares = percent(line["regrets"]), percent([line["predicted_regret"]])
        yield line["problem"], seconds, f"{line['tried'][0]} of {line['space']}", *shares, *times


def by_kind(cases: Iterable[Case]) -> dict[Kind, list[Pair]]:
    """Return times by kind."""
    kinds: dict[Kind, list[Pair]] = {}
    for kind, times in cases:
        kinds.setdefault(kind, []).append(times)
    return kinds


def case(line: Line) -> Case:
    return kind_of(line), pair(line, at=sizes_label(line))


def rows(lines: Iterable[Line]) -> list[Cells]:
    """Return a row for each kind of some lines."""
    own = by_kind(map(case, lines))
    return [(*kind, *spread(found)) for kind, found in sorted(own.items())]


def permutations(cases: Iterable[Line], large_gbps: float) -> Iterator[Cells]:
    """Yield rates of permutations by that of one large copy, and by that of a copy of as many bytes."""
    kinds: dict[str, list[Line]] = {}
    for line in cases:
        kinds.setdefault(permutation_kind(line), []).append(line)
    for kind, own in kinds.items():
        rates = [line["gbps"] for line in own]
        count, weighted, middle, _, worst, at = spread(map(drawn.versus_copy, own))
        yield kind, count, f"{geomean(rates) / large_gbps:.2f}", weighted, middle, worst, at


def large(results: Path) -> Iterator[Cells]:
    """Yield TFLOP/s of the suite `large`, from the folders of all GPUs."""
    for folder in sorted((path for path in results.iterdir() if path.is_dir()), reverse=True):
        for line in latest(read(folder / "large.jsonl"), (*EXTENTS, "layout")):
            flops = 2 * math.prod(line[extent] for extent in EXTENTS)
            rates = (flops / line[f"{who}_us"] / 1e6 for who in ("torch", "tritile", "triton"))
            gpu = line["env"]["gpu"].split()[1]
            yield gpu, sizes_label(line), line["layout"], *(f"{rate:.0f}" for rate in rates)


def advice(kind: Kind) -> str:
    """Return what to use for a kind, in a sentence."""
    suite, dtype, _ = kind
    fits = (text for of, by, text in ADVICE if suite.startswith(of) and dtype.startswith(by))
    return next(fits, OTHERWISE)


def _of_gpu(folder: Path) -> Iterator[Case]:
    """Yield the cases of one GPU: its lines, then those of one weight and of models."""
    for line in of_cases(stored([folder], print)):
        yield case(line)
    for line in drawn.latest_rows(read(folder / "rows.jsonl")):
        kind = "one weight, any rows", "bfloat16", "NT"
        for times in drawn.of_one_weight(line):
            yield kind, times
    for line in drawn.latest_models(read(folder / "models.jsonl")):
        times = Pair(line["torch_ms"], line["tritile_ms"], line["model"])
        yield (f"models, {line['process']} process", line["mode"], line["what"]), times


def losses(results: Path) -> Iterator[Cells]:
    """Yield a row for each kind at `SLOWER` or below by time or on the mean, on every GPU."""
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        for kind, found in sorted(by_kind(_of_gpu(folder)).items()):
            ratios = by_time(found), mean(found)
            if min(ratios) <= SLOWER:
                count, _, _, *rest = spread(found)
                gpu = folder.name.split("-")[1].upper()
                yield gpu, advice(kind), *kind, count, *(f"{each:.2f}" for each in ratios), *rest
