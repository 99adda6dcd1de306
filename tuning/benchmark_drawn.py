"""Make the tables of docs/benchmark_details.md about the suites whose sizes nobody chose.

The lines of a suite are results/<gpu>/<suite>.jsonl. A table says which GPUs have no lines yet.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmark_results import case_of, sizes_label
from benchmark_tables import Cells, Line, Pair, latest, mean, measured_on, pair, read, spread, starts, table
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.tune.calibrate.draw import ROOF_US, limits_us
from tritile.tune.suites import PERMUTE_ITEMSIZE

KINDS = (
    "aligned products",
    "aligned products, compared with max-autotune",
    "ragged products",
    "ragged products, compared with max-autotune",
    "permutations, compared with a copy",
)
OWN = ", tritile's own kernels"
DRAWS = 3  # the newest draws that are shown
BOUNDS = "compute-bound", "memory-bound"
TIMES = {"over 100 us": 100.0, "10 to 100 us": 10.0, "under 10 us": 0.0}  # at the roof
PITCHED, PITCHED_US = "compute-bound, 10 us and more, rows 16 bytes apart", 10.0
PERMUTED_HEAD = "bytes an element | sizes: | by time, of a copy: | mean: | 5%: | under 1: | worst: | at"
SIDES = "tritile_us", "triton_us"  # as called, and by own kernels alone
CLASSES_HEAD = (
    "aligned products | sizes: | of torch's time: | torch, of the roof: | as called, of the roof: "
    "| own, of the roof: | as called, by time: | own kernels, by time:"
)


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


def versus_copy(line: Line) -> Pair:
    """Return the times of a plain copy of as many bytes and of a permutation."""
    own = line["tritile_us"]
    return Pair(own * line["gbps"] / line["copy_gbps"], own, sizes_label(line))


def drawn_kinds(line: Line) -> Iterator[tuple[str, Pair]]:
    """Yield the kinds of an unseen line, each with its times."""
    if line["op"] == "permute":
        yield KINDS[-1], versus_copy(line)
        return
    i, at = 2 if line["n"] % 8 or line["k"] % 8 else 0, sizes_label(line)
    kind = KINDS[i]
    yield kind, pair(line, at=at)
    if "triton_us" in line:
        yield kind + OWN, pair(line, own="triton_us", at=at)
    if line.get("inductor_us") is not None:
        yield KINDS[i + 1], pair(line, "inductor_us", at=at)


def classes(lines: list[Line], memory_gbps: float) -> Iterator[Cells]:
    """Yield a row for each class of aligned products: what bounds them, and the least time that they take.

    The roof is that time: `limits_us`, or an empty launch. The last row is of rows that lie 16 bytes apart.
    """
    found: dict[str, list[tuple[Line, float]]] = {
        f"{bound}, {time}": [] for bound in BOUNDS for time in TIMES
    }
    found[PITCHED] = []
    for line in lines:
        problem = case_of(line).problem
        assert isinstance(problem, MatmulProblem)
        limits = limits_us(problem, memory_gbps)
        roof, bound = max(*limits, ROOF_US), BOUNDS[limits[0] < limits[1]]
        time = next(name for name, least in TIMES.items() if roof >= least)
        found[f"{bound}, {time}"].append((line, roof))
        if (bound, starts(line)) == (BOUNDS[0], 16) and roof >= PITCHED_US:
            found[PITCHED].append((line, roof))
    whole = sum(line["torch_us"] for line in lines)
    for name, own in found.items():
        if own:
            roof = sum(us for _, us in own)
            torch, *ours = (sum(line[side] for line, _ in own) for side in ("torch_us", *SIDES))
            shares = (f"{roof / us:.2f}" for us in (torch, *ours))
            yield name, str(len(own)), f"{torch / whole:.0%}", *shares, *(f"{torch / us:.3f}" for us in ours)


def permuted(lines: Iterable[Line]) -> Iterator[Cells]:
    """Yield a row for permutations of elements of each size, compared with a copy."""
    groups: dict[int, list[Pair]] = {}
    for line in lines:
        groups.setdefault(PERMUTE_ITEMSIZE[line["dtype"]], []).append(versus_copy(line))
    for size, own in sorted(groups.items()):
        yield str(size), *spread(own, low=True)


def unseen(lines: list[Line]) -> Iterator[str]:
    """Show the draws, together and one by one."""
    by_seed = draws(lines)
    together = [line for found in by_seed.values() for line in found]
    yield measured_on(together)
    groups = {f"last {len(by_seed)} together": together} if len(by_seed) > 1 else {}
    groups |= {seed[:8]: found for seed, found in by_seed.items()}
    made = []
    kinds = (KINDS[0], KINDS[0] + OWN, KINDS[1], KINDS[2], KINDS[2] + OWN, *KINDS[3:])
    for kind in kinds:
        for name, found in groups.items():
            times = [own for line in found for of, own in drawn_kinds(line) if of == kind]
            if times:
                made.append((kind, name, *spread(times, low=True)))
    of = {kind: [line for line in together if kind in dict(drawn_kinds(line))] for kind in KINDS}
    for kind in (KINDS[0], KINDS[2]):
        rest = [line for line in of[kind] if line.get("config", {}).get("family") != "aten"]
        if len(rest) < len(of[kind]):
            share = f"{1 - len(rest) / len(of[kind]):.0%} of the {kind}"
            others = mean(map(pair, rest))
            yield f"torch's own kernel ran {share}; the geometric mean of the others is {others:.3f}."
    yield table("of | draw | sizes: | by time: | geometric mean: | 5%: | under 1: | worst: | at", made)
    device = next((each for each in TARGETS.values() if each.name == together[0]["env"]["gpu"]), None)
    if device is not None:
        yield table(CLASSES_HEAD, classes(of[KINDS[0]], device.memory_gbps))
    if of[KINDS[-1]]:
        yield table(PERMUTED_HEAD, permuted(of[KINDS[-1]]))


def of_one_weight(line: Line) -> Iterator[Pair]:
    """Yield the times of one weight at each number of rows."""
    for m, torch, own in zip(line["rows"], line["torch_us"], line["tritile_us"], strict=True):
        yield Pair(torch, own, f"{m}x{line['size']}x{line['size']}")


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
        ratios.append((*names, *spread(of_one_weight(line), low=True)))
    kinds = "process | mode | weight | draw | sizes:"
    yield table(
        f"{kinds} | first calls, s: | median, ms: | slowest, ms: | kernels compiled: | in s: | second calls, "
        "median ms:",
        calls,
    )
    yield table(f"{kinds} | by time: | geometric mean: | 5%: | under 1: | worst: | at", ratios)


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
        center = f"{mean(Pair(line['torch_ms'], line['tritile_ms'], line['model']) for line in group):.2f}"
        before, after = (
            statistics.median(line[f"first_{side}_s"] for line in group) for side in ("torch", "tritile")
        )
        made.append((*names, str(len(group)), center, shown, worst["model"], f"{before:.1f}", f"{after:.1f}"))
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
