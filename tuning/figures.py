"""Write docs/benchmarks.md from the committed lines, and print the table of README.md.

Run `python tuning/figures.py` when lines change, and paste the table into README.md. A test compares both.
The page's text, and which lines its tables show, are in pages/benchmarks.md, a template of jinja.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import jinja2

import benchmark_drawn as drawn
import benchmark_kinds as kinds
from benchmark_kinds import DEVICE, HERE, RESULTS
from benchmark_tables import Cells, Line, measured_on, read, span, table
from tritile.core.problem import MatmulProblem
from tritile.lab.report import recorded
from tritile.lab.report.results import stored
from tritile.lab.report.summary import of_cases
from tritile.planning import model

PAGE: Final = HERE.parent / "docs" / "benchmarks.md"
TEMPLATE: Final = HERE / "pages" / "benchmarks.md"
DATA: Final = ("normal", "uniform", "log-normal", "cancelling", "graded", "badly ranged")
DEPTH: Final = 8192  # terms of a sum, of the errors that the page shows
README_HEAD: Final = "on one H200 | problems: | torch's time / tritile's: | worst:"
README_ROWS: Final = """
bf16, ragged, untuned | kind == "drawn, ragged"
bf16 and fp16, ragged, tuned | short and suite == "ragged"
bf16, aligned, untuned | kind == "drawn, aligned"
bf16 and fp16, aligned, tuned | short and suite in ALIGNED
permutations, untuned | kind == "drawn, permutations"
permutations, tuned | op == "permute" and suite != "unseen"
bf16, `linear` with its epilogue | suite == "epilogue"
int4 weights, up to 16 rows | suite == "weights" and m <= 16 and layout.startswith("int4")
int4 weights, 256 and 4096 rows | suite == "weights" and m > 16 and layout.startswith("int4")
fp32, `fp16x3` | suite == "fp32" and precision == "fp16x3"
fp32, `ieee` | suite in ("square", "ragged") and dtype == "float32"
fp64, `ieee` | suite == "fp64" and precision == "ieee"
"""


def power(value: float) -> str:
    """Write an error: 1.1e-7, 1.7 or 0."""
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+00", "")


def errors(lines: list[Line]) -> Iterator[Cells]:
    """Yield tritile's and torch's error of the norm, a row for each dtype and precision."""
    shown: dict[str, dict[str, str]] = {}
    for line in lines:
        name = f"{line['dtype']} {line['precision']}".rstrip()
        shown.setdefault(name, {})[line["data"]] = f"{power(line['error'])} / {power(line['torch_error'])}"
    for name, by_data in shown.items():
        yield name, *(by_data.get(data, "") for data in DATA)


def predictions() -> Iterator[Cells]:
    """Yield the median error of predicted times, by store of trials and by operation."""
    for path in sorted((HERE / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz")):
        kinds: dict[str, tuple[list[float], list[float]]] = {}
        for (problem, _), times in recorded.times([path], DEVICE).items():
            kind = "products" if isinstance(problem, MatmulProblem) else "permutations"
            off = {one: abs(model.predict_us(one, problem, DEVICE) / us - 1) for one, us in times.items()}
            everything, fastest = kinds.setdefault(kind, ([], []))
            everything += off.values()
            fastest.append(off[min(times, key=lambda config, times=times: times[config])])
        for kind, of_both in kinds.items():
            yield path.name, kind, *(f"{statistics.median(values):.0%}" for values in of_both)


def page(results: Path = HERE / "results") -> str:
    """Return the whole page."""
    lines = stored([RESULTS], print)
    cases = [kinds.told(line) for line in of_cases(lines)]
    accuracy = read(HERE / "accuracy" / f"{DEVICE.slug}.jsonl")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["spans"] = lambda text: table(kinds.SPAN_HEAD, kinds.spans(cases, text)) + "\n"
    return environment.from_string(TEMPLATE.read_text()).render(
        drawn=drawn, kinds=kinds, results=results, lines=lines, cases=cases, DATA=DATA, DEPTH=DEPTH,
        table=table, measured_on=measured_on, power=power, median=statistics.median,
        errors=errors, predictions=predictions,
        pick=lambda condition: kinds.picked(cases, condition),
        span=lambda values: " | ".join(span(values)),
        accuracy=[line for line in accuracy if line["k"] == DEPTH and line["data"] in DATA],
        ladder=read(HERE / "ladder" / f"{DEVICE.slug}.json"),
        autotune=read(RESULTS / "autotune.json"), study=read(RESULTS / "study.json"),
    )  # fmt: skip


def readme_table() -> str:
    """Return the table of README.md."""
    cases = [kinds.told(line) for line in of_cases(stored([RESULTS], print))]
    return table(README_HEAD, kinds.summary(cases, README_ROWS)) + "\n"


def main() -> None:
    """Write docs/benchmarks.md, then print the table of README.md."""
    PAGE.write_text(page())
    print(readme_table(), end="")


if __name__ == "__main__":
    main()
