"""What tritile aims at, as data, and how far results are from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from tritile.core.problem import FP8_DTYPES
from tritile.lab.report.results import HOST, Result, latest
from tritile.lab.report.summary import dtype_label, geomean, sizes_label
from tritile.tune.suites import PERMUTE_ITEMSIZE, Case

Values = list[tuple[float, str]]  # a number to be compared with a target, and what it is of
Select = Callable[[list[Result]], Values]

_ALIGNED: Final = ("square", "llm", "deep", "batched")
_SHORT: Final = ("float16", "bfloat16")
_THIN: Final = 128  # the largest extent of what is thin


@dataclass(frozen=True)
class Target:
    """The least that the worst and the geometric mean of some numbers should be; None: no such aim.

    `select` takes these numbers from results in order of time. `noise`: a worst below its target, but
    not below this, counts as met. `groups` also shows each suite and layout by itself.
    """

    what: str
    select: Select
    worst: float | None = None
    geomean: float | None = None
    noise: float | None = None
    groups: bool = False


@dataclass(frozen=True)
class Row:
    """A target beside what was measured: nothing where `cases` is 0. `met` is None if nothing is asked."""

    what: str
    cases: int
    worst: float | None
    worst_label: str
    geomean: float | None
    target: Target
    worst_met: bool | None
    geomean_met: bool | None

    @property
    def met(self) -> bool | None:
        """Whether all that the target asks for is met."""
        asked = [met for met in (self.worst_met, self.geomean_met) if met is not None]
        return all(asked) if asked else None


def _label(line: Result) -> str:
    words = (line["suite"], sizes_label(line), dtype_label(line["dtype"], line["precision"] or ""))
    return " ".join((*words, line["layout"] or "")).rstrip()


def _short_products(results: Iterable[Result], suites: tuple[str, ...]) -> list[Result]:
    return [
        line
        for line in results
        if line["op"] == "matmul" and line["suite"] in suites and line["dtype"] in _SHORT
    ]


def _ratios(peer: str, suites: tuple[str, ...]) -> Select:
    """Ratios to a peer of the suites' products of 16-bit types."""

    def select(results: list[Result]) -> Values:
        lines = _short_products(results, suites)
        # A later run without this peer says nothing of it.
        lines = latest(line for line in lines if line.get(f"ratio_{peer}") is not None)
        return [(line[f"ratio_{peer}"], _label(line)) for line in lines]

    return select


def _squares(results: Iterable[Result], size: int) -> dict[tuple[str, str], Result]:
    """The newest product of these sizes, of any suite, by dtype and layout."""
    cube = [line for line in results if line["op"] == "matmul" and line["dtype"] in _SHORT]
    cube = [line for line in cube if (line["batch"], line["m"], line["n"], line["k"]) == (1, *[size] * 3)]
    return {(line["dtype"], line["layout"]): line for line in cube}


def _odd_square(results: list[Result]) -> Values:
    odd, even = _squares(results, 8191), _squares(results, 8192)
    both = [key for key in odd if key in even and key[0] == "bfloat16" and key[1] in ("NN", "NT")]
    return [(odd[key]["tflops"] / even[key]["tflops"], " ".join(key)) for key in both]


def _host_cost(results: list[Result]) -> Values:
    lines = [line for line in latest(results) if line["op"] == HOST and line["call"].startswith("matmul")]
    return [(line["ratio_torch"], line["call"]) for line in lines]


def _peak_rate(results: list[Result]) -> Values:
    rates = [(line["tflops"], " ".join(key)) for key, line in _squares(results, 8192).items()]
    return sorted(rates)[-1:]


def kind_of(line: Result) -> str:
    """What kind of permutation this is, of x that fills 64 MiB: the rest is "small"."""
    case = Case(line["suite"], "permute", line["dtype"], shape=tuple(line["shape"]), dims=tuple(line["dims"]))
    problem, size = case.problem, PERMUTE_ITEMSIZE[case.dtype]
    if problem.bytes < 2**27:
        return "small"
    if len(case.shape) > 3 or min(problem.m, problem.n) <= _THIN:
        return "thin shapes and rank 4 to 6"
    if size == 1:
        return "1-byte elements"
    return "odd sizes" if any(extent % 2 for extent in case.shape) else "even sizes"


def _permutes(results: list[Result]) -> Values:
    return [(line["ratio_torch"], _label(line)) for line in latest(results) if line["op"] == "permute"]


def _by_copy(kind: str) -> Select:
    """Rates of the permutations of a kind, by that of a plain copy."""

    def select(results: list[Result]) -> Values:
        lines = [line for line in latest(results) if line["op"] == "permute" and line.get("copy_gbps")]
        return [(line["gbps"] / line["copy_gbps"], _label(line)) for line in lines if kind_of(line) == kind]

    return select


def _large(line: Result, least: int) -> bool:
    return min(line["m"], line["n"], line["k"]) >= least


def _best_peers(wanted: Callable[[Result], bool]) -> Select:
    """Ratios to torch, or to torch.compile where that is faster, of the results that are wanted."""

    def select(results: list[Result]) -> Values:
        lines = [line for line in latest(results) if line["op"] != HOST and wanted(line)]
        ratios = [(line["ratio_torch"], line.get("ratio_inductor") or line["ratio_torch"]) for line in lines]
        return [(min(pair), _label(line)) for pair, line in zip(ratios, lines, strict=True)]

    return select


def _fp8(line: Result) -> bool:
    return line["op"] == "matmul" and line["dtype"] in FP8_DTYPES


def _by_blocks(results: list[Result]) -> Values:
    """Rates of fp8 products with scales for each 128 of K, by the fastest of the same size without."""
    lines = [line for line in latest(results) if line["op"] == "matmul" and _fp8(line)]
    sizes = {id(line): (line["m"], line["n"], line["k"]) for line in lines}
    plain: dict[tuple[int, int, int], float] = {}
    for line in lines:
        if not line.get("block_scales"):
            plain[sizes[id(line)]] = max(line["tflops"], plain.get(sizes[id(line)], 0.0))
    scaled = [line for line in lines if line.get("block_scales") and sizes[id(line)] in plain]
    return [(line["tflops"] / plain[sizes[id(line)]], _label(line)) for line in scaled]


# Of the types that vendors' libraries serve less well, or not at all.
_TYPES: Final = (
    Target(
        "fp32 by fp16x3 against cuBLAS, from 4096 up",
        _best_peers(
            lambda line: line["precision"] == "fp16x3" and line["dtype"] == "float32" and _large(line, 4096)
        ),
        3.5,
    ),
    Target(
        "fp64 by ozaki against cuBLAS, from 8192 up",
        _best_peers(
            lambda line: line["precision"] == "ozaki" and line["dtype"] == "float64" and _large(line, 8192)
        ),
        1.0,
    ),
    Target(
        "int8 to int32 against cuBLAS, from 2048 up",
        _best_peers(lambda line: line["dtype"] == "int8" and not line.get("epilogue") and _large(line, 2048)),
        1.4,
    ),
    Target("fp8 against cuBLAS", _best_peers(lambda line: _fp8(line) and not line.get("block_scales")), 1.0),
    Target("fp8 with scales per 128 of K against itself without", _by_blocks, 0.85),
    Target(
        "int4 weights against bf16, up to 16 rows",
        _best_peers(
            lambda line: (
                line["op"] == "linear_quantized" and line["layout"].startswith("int4") and line["m"] <= 16
            )
        ),
        2.5,
    ),
    Target("groups against the best peer", _best_peers(lambda line: line["op"] == "grouped"), None, 1.1),
    Target(
        "epilogues and gates against the best peer",
        _best_peers(lambda line: line["suite"] in ("epilogue", "gated")),
        1.0,
    ),
)
TARGETS: Final = (
    Target(f"{', '.join(_ALIGNED)} against cuBLAS", _ratios("torch", _ALIGNED), 1.0, 1.1, 0.97, groups=True),
    Target("ragged against cuBLAS", _ratios("torch", ("ragged",)), 1.5, 4.0),
    Target("ragged against torch.compile max-autotune", _ratios("inductor", ("ragged",)), 1.0, 1.1),
    Target("against Triton's tutorial", _ratios("tutorial", (*_ALIGNED, "ragged"))),
    Target("8191^3 against tritile's own 8192^3", _odd_square, 0.92),
    Target("host cost of a call against torch.matmul", _host_cost, 1.0),
    Target("peak rate at 8192^3, TFLOP/s", _peak_rate, 800.0),
    Target("permute against torch", _permutes, 1.0, 4.0),
    Target("permute against a copy: even sizes", _by_copy("even sizes"), 0.95, 0.97),
    Target("permute against a copy: odd sizes", _by_copy("odd sizes"), 0.9, 0.94),
    Target("permute against a copy: 1-byte elements", _by_copy("1-byte elements"), 0.9, 0.95),
    Target(
        "permute against a copy: thin shapes and rank 4 to 6",
        _by_copy("thin shapes and rank 4 to 6"),
        0.85,
        0.93,
    ),
    *_TYPES,
)


def _row(what: str, values: Values, target: Target) -> Row:
    worst, label = min(values, default=(None, ""))
    mean = geomean(value for value, _ in values) if values else None
    enough = target.worst if target.noise is None else target.noise
    return Row(
        what,
        len(values),
        worst,
        label,
        mean,
        target,
        None if worst is None or enough is None else worst >= enough,
        None if mean is None or target.geomean is None else mean >= target.geomean,
    )


def _time(line: Result) -> str:
    return line["env"]["time"]


def compare(results: Iterable[Result]) -> list[Row]:
    """Each target beside the newest results of one GPU; of a case measured again, the last time counts."""
    lines = sorted(results, key=_time)
    rows: list[Row] = []
    for target in TARGETS:
        if target.groups:
            keys = dict.fromkeys((line["suite"], line["layout"]) for line in _short_products(lines, _ALIGNED))
            for suite, layout in sorted(keys, key=lambda key: (_ALIGNED.index(key[0]), key[1])):
                part = [line for line in lines if (line["suite"], line.get("layout")) == (suite, layout)]
                rows.append(_row(f"{suite} {layout} against cuBLAS", target.select(part), target))
        rows.append(_row(target.what, target.select(lines), target))
    return rows
