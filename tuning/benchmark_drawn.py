"""Write docs/benchmarks.md from the committed lines of the suites whose sizes nobody chose.

`python tuning/figures.py` calls it. A suite's lines are results/<gpu>/<suite>.jsonl; one that has none for a
GPU is told.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tritile.lab.report.summary import geomean, sizes_label

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
DRAWS = 3  # the last ones, which are told
HEAD = """# Benchmarks

`python tuning/figures.py` writes this page from the lines in `tuning/results/`. These are the suites whose
sizes nobody chose, so that nothing can be tuned to them. Tables of sizes that were tuned, and how times are
taken, are in the [README](../README.md#measured). A ratio is torch's time by tritile's: above 1 tritile is
faster. "5%" is the 5th percentile.
"""
UNSEEN = """
## unseen: products and permutations of drawn sizes

A draw has 200 products in bfloat16, NN and NT in turn, and 100 permutations, with the configs that a call
uses where nothing is remembered. Products are aligned where N and K are multiples of 8, else ragged; told are
their ratios. Of permutations the rate is told, by that of a copy of as many bytes. A draw is named after its
seed; the last three are told.

`python tuning/unseen.py --results tuning/results/GPU` adds a draw.
"""
ROWS = """
## rows: one weight, whatever the number of rows

A square weight in bfloat16, NT, is multiplied with drawn numbers of rows up to 4096. One process begins with
nothing compiled and nothing remembered, the next finds what the first compiled. First calls are timed by the
host, to the end of their product; ratios are of the GPU's time, in CUDA graphs. The last run of each kind is
told.

`python tuning/rows.py --results tuning/results/GPU` adds a run.
"""
MODELS = """
## models: models of transformers with and without `use_in_torch`

Forward passes and training steps of eight models with random weights in bfloat16. A ratio is the time without
the switch by that with it; behind the worst stands its 95% interval. The first process of a model finds no
compiled kernel, a later one those of the first. The time of a very first iteration is the median over models.
The last line of each model is told.

`python tuning/models.py --results tuning/results/GPU` adds lines; `--compiled` those of torch.compile.
"""
Line = dict[str, Any]
Cells = tuple[str, ...]


def read(folder: Path, suite: str) -> list[Line]:
    """Read the lines of a suite, none where there is no file."""
    path = folder / f"{suite}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(head: str, made: Iterable[Cells]) -> str:
    """Make a table: columns of `head` that end with a colon hold numbers."""
    names = [name.strip() for name in head.split("|")]
    ruled = ("---:" if name.endswith(":") else "---" for name in names)
    shown = ([name.rstrip(":") for name in names], ruled, *made)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)


def measured_on(lines: Iterable[Line]) -> str:
    """Tell the GPU, versions and commits of lines."""
    envs = [line["env"] for line in lines]
    told = {name: ", ".join(dict.fromkeys(env[name] for env in envs)) for name in ("gpu", "torch", "triton")}
    commits = ", ".join(dict.fromkeys(env["tritile"][:7] for env in envs))
    return "**{gpu}**, torch {torch}, triton {triton}, tritile at {}".format(commits, **told)


def low(values: Iterable[float]) -> float:
    """Give the 5th percentile."""
    ordered = sorted(values)
    return ordered[int(0.05 * (len(ordered) - 1))]


def spread(values: list[tuple[float, str]]) -> Cells:
    """Tell the geometric mean, 5th percentile and worst of values, each with where it was taken."""
    numbers = [value for value, _ in values]
    worst, at = min(values)
    return f"{geomean(numbers):.2f}", f"{low(numbers):.2f}", f"{worst:.2f}", at


def latest(lines: Iterable[Line], names: Cells) -> list[Line]:
    """Give the last line of those alike in these fields, in the order in which they first came."""
    return list({tuple(str(line.get(name)) for name in names): line for line in lines}.values())


def draws(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Give the last draws by seed, oldest first, each case of one once."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        seed = line["env"]["seed"]
        found[seed] = [*found.pop(seed, []), line]
    case = ("op", "dtype", "layout", "m", "n", "k", "shape", "dims")
    return {seed: latest(found[seed], case) for seed in list(found)[-DRAWS:]}


def drawn_kind(line: Line) -> tuple[str, float]:
    """Name the kind of an unseen line, and its figure."""
    if line["op"] == "permute":
        return "permutations, by a copy", line["gbps"] / line["copy_gbps"]
    kind = "ragged products" if line["n"] % 8 or line["k"] % 8 else "aligned products"
    return kind, line["ratio_torch"]


def unseen(lines: list[Line]) -> Iterator[str]:
    """Tell draws, together and one by one."""
    by_seed = draws(lines)
    together = [line for found in by_seed.values() for line in found]
    yield measured_on(together)
    groups = {f"last {len(by_seed)} together": together} if len(by_seed) > 1 else {}
    groups |= {seed[:8]: found for seed, found in by_seed.items()}
    made = []
    for kind in ("aligned products", "ragged products", "permutations, by a copy"):
        for name, found in groups.items():
            values = [(drawn_kind(x)[1], sizes_label(x)) for x in found if drawn_kind(x)[0] == kind]
            if values:
                made.append((kind, name, str(len(values)), *spread(values)))
    yield table("of | draw | sizes: | geometric mean: | 5%: | worst: | at", made)


def rows(lines: list[Line]) -> Iterator[str]:
    """Tell first calls, and what they come to on the GPU."""
    found = latest(lines, ("mode", "size", "process"))
    yield measured_on(found)
    calls, ratios = [], []
    for line in found:
        count, ms = len(line["rows"]), line["first_ms"]
        names = (line["process"], line["mode"], "{0}x{0}".format(line["size"]), line["env"]["seed"][:8])
        slow, at = max(zip(ms, line["rows"], strict=True))
        times = f"{sum(ms) / 1e3:.2f}", f"{statistics.median(ms):.2f}", f"{slow:.0f} ({at} rows)"
        again = f"{statistics.median(line['second_ms']):.3f}"
        calls.append((*names, str(count), *times, str(line["kernels"]), f"{line['compile_s']:.1f}", again))
        at_rows = [f"{m} rows" for m in line["rows"]]
        ratios.append((*names, str(count), *spread(list(zip(line["ratio_torch"], at_rows, strict=True)))))
    kinds = "process | mode | weight | draw | sizes:"
    yield table(
        f"{kinds} | first calls, s: | median, ms: | slowest, ms: | kernels compiled: | in s: | second calls, "
        "median ms:",
        calls,
    )
    yield table(f"{kinds} | geometric mean: | 5%: | worst: | at", ratios)


def models(lines: list[Line]) -> Iterator[str]:
    """Tell ratios over models."""
    found = latest(lines, ("process", "mode", "what", "model"))
    yield measured_on(found)
    groups: dict[Cells, list[Line]] = {}
    for line in found:
        groups.setdefault((line["process"], line["mode"], line["what"]), []).append(line)
    made = []
    for names, group in groups.items():
        worst = min(group, key=lambda line: line["ratio"])
        shown = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**worst)
        mean = f"{geomean(line['ratio'] for line in group):.2f}"
        off, on = (statistics.median(line[f"first_{side}_s"] for line in group) for side in ("off", "on"))
        made.append((*names, str(len(group)), mean, shown, worst["model"], f"{off:.1f}", f"{on:.1f}"))
    yield table(
        "process | mode | pass | models: | geometric mean: | worst: | of | first iteration without, s: "
        "| with, s:",
        made,
    )


SUITES: dict[str, tuple[str, Callable[[list[Line]], Iterator[str]]]] = {
    "unseen": (UNSEEN, unseen), "rows": (ROWS, rows), "models": (MODELS, models),
}  # fmt: skip


def page(results: Path = HERE / "results") -> str:
    """Make the page of the results in a folder, which has a folder for each GPU."""
    text = HEAD
    for suite, (about, told) in SUITES.items():
        text += about
        for folder in sorted(path for path in results.iterdir() if path.is_dir()):
            lines = read(folder, suite)
            parts = told(lines) if lines else [f"`{folder.name}`: no lines yet."]
            text += "".join(f"\n{part.rstrip()}\n" for part in parts)
    return text


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())
