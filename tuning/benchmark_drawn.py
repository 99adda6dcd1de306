"""Make the tables of docs/benchmarks.md about the suites whose sizes nobody chose.

The lines of a suite are results/<gpu>/<suite>.jsonl. A table says which GPUs have no lines yet.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean as geomean

from benchmark_tables import Cells, Line, latest, measured_on, read, spread, table
from tritile.lab.results import sizes_label

KINDS = (
    "aligned products",
    "aligned products, compared with max-autotune",
    "ragged products",
    "permutations, compared with a copy",
)
OWN = ", tritile's own kernels"
DRAWS = 3  # the newest draws that are shown


def latest_rows(lines: Iterable[Line]) -> list[Line]:
    """Return the newest run of one weight of each kind."""
    return latest(lines, ("mode", "size", "process"))


def latest_models(lines: Iterable[Line]) -> list[Line]:
    """Return the newest line of each model, process, mode and pass."""
    return latest(lines, ("process", "mode", "what", "model"))


def draws(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the newest draws by seed, oldest first, each case once."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        seed = line["env"]["seed"]
        found[seed] = [*found.pop(seed, []), line]
    case = ("op", "dtype", "layout", "m", "n", "k", "shape", "dims")
    return {seed: latest(found[seed], case) for seed in list(found)[-DRAWS:]}


def drawn_kinds(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the kinds of an unseen line, each with its figure."""
    if line["op"] == "permute":
        yield KINDS[-1], line["gbps"] / line["copy_gbps"]
        return
    kind = KINDS[2 if line["n"] % 8 or line["k"] % 8 else 0]
    yield kind, line["ratio_torch"]
    if "triton_us" in line:
        yield kind + OWN, line["torch_us"] / line["triton_us"]
    if line.get("ratio_inductor") is not None:
        yield KINDS[1], line["ratio_inductor"]


def unseen(lines: list[Line]) -> Iterator[str]:
    """Show the draws, together and one by one."""
    by_seed = draws(lines)
    together = [line for found in by_seed.values() for line in found]
    yield measured_on(together)
    groups = {f"last {len(by_seed)} together": together} if len(by_seed) > 1 else {}
    groups |= {seed[:8]: found for seed, found in by_seed.items()}
    made = []
    kinds = (KINDS[0], KINDS[0] + OWN, KINDS[1], KINDS[2], KINDS[2] + OWN, KINDS[3])
    for kind in kinds:
        for name, found in groups.items():
            values = [(figure, sizes_label(x)) for x in found for of, figure in drawn_kinds(x) if of == kind]
            if values:
                made.append((kind, name, *spread(values, low=True)))
    for kind in (KINDS[0], KINDS[2]):
        of = [line for line in together if kind in dict(drawn_kinds(line))]
        rest = [line["ratio_torch"] for line in of if line.get("config", {}).get("family") != "aten"]
        if len(rest) < len(of):
            share = f"{1 - len(rest) / len(of):.0%} of the {kind}"
            yield f"torch's own kernel ran {share}; the geometric mean of the others is {geomean(rest):.3f}."
    yield table("of | draw | sizes: | geometric mean: | 5%: | under 1: | worst: | at", made)


def rows(lines: list[Line]) -> Iterator[str]:
    """Show first calls on the host, and ratios on the GPU."""
    found = latest_rows(lines)
    yield measured_on(found)
    calls, ratios = [], []
    for line in found:
        ms, seconds = line["first_ms"], (sum(line["first_ms"]) / 1e3, line["compile_s"])
        names = (line["process"], line["mode"], "{0}x{0}".format(line["size"]), line["env"]["seed"][:8])
        slow, at = max(zip(ms, line["rows"], strict=True))
        times = f"{seconds[0]:.2f}", f"{statistics.median(ms):.2f}", f"{slow:.0f} ({at} rows)"
        again = f"{statistics.median(line['second_ms']):.3f}"
        calls.append((*names, str(len(ms)), *times, str(line["kernels"]), f"{seconds[1]:.1f}", again))
        of_rows = zip(line["ratio_torch"], (f"{m} rows" for m in line["rows"]), strict=True)
        ratios.append((*names, *spread(of_rows, low=True)))
    kinds = "process | mode | weight | draw | sizes:"
    yield table(
        f"{kinds} | first calls, s: | median, ms: | slowest, ms: | kernels compiled: | in s: | second calls, "
        "median ms:",
        calls,
    )
    yield table(f"{kinds} | geometric mean: | 5%: | under 1: | worst: | at", ratios)


def models(lines: list[Line]) -> Iterator[str]:
    """Show ratios over models."""
    found = latest_models(lines)
    yield measured_on(found)
    groups: dict[Cells, list[Line]] = {}
    for line in found:
        groups.setdefault((line["process"], line["mode"], line["what"]), []).append(line)
    made = []
    for names, group in groups.items():
        worst = min(group, key=lambda line: line["ratio"])
        shown = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**worst)
        mean = f"{geomean(line['ratio'] for line in group):.2f}"
        before, after = (
            statistics.median(line[f"first_{side}_s"] for line in group) for side in ("torch", "tritile")
        )
        made.append((*names, str(len(group)), mean, shown, worst["model"], f"{before:.1f}", f"{after:.1f}"))
    yield table(
        "process | mode | pass | models: | geometric mean: | worst: | of | first iteration, torch, s: "
        "| converted, s:",
        made,
    )


TOLD: dict[str, Callable[[list[Line]], Iterator[str]]] = {"unseen": unseen, "rows": rows, "models": models}


def of_gpus(results: Path, suite: str) -> str:
    """Return the tables of a suite, from a folder of results that has a folder for each GPU."""
    parts: list[str] = []
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        lines = read(folder / f"{suite}.jsonl")
        parts += TOLD[suite](lines) if lines else [f"`{folder.name}`: no lines yet."]
    return "\n\n".join(parts)
