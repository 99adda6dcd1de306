"""Write docs/benchmarks.md from the committed lines, and print the table of README.md.

Run `python tuning/figures.py` when lines change, and paste the table into README.md. A test compares both.
"""

from collections.abc import Iterator

import benchmarks
from benchmark_tables import Cells, table
from benchmark_tuned import (
    ALIGNED,
    DRAWN,
    RESULTS,
    Wanted,
    drawn_kind,
    figures_of,
    is_fp32,
    of,
    short,
    tuned_permutations,
)
from tritile.lab.report.results import Result, stored
from tritile.lab.report.summary import of_cases, sizes_label

HEAD = "on one H200 | problems: | torch's time / tritile's: | worst:"


def summary(lines: list[Result]) -> Iterator[Cells]:
    """Return the rows of README.md's table."""
    cases = of_cases(lines)
    drawn = [line for line in cases if line["suite"] == DRAWN]
    kinds: tuple[tuple[str, list[Result], Wanted], ...] = (
        ("bf16, ragged, untuned", drawn, lambda x: drawn_kind(x)[0] == "drawn, ragged"),
        ("bf16 and fp16, ragged, tuned", cases, lambda x: short(x, "ragged")),
        ("bf16, aligned, untuned", drawn, lambda x: drawn_kind(x)[0] == "drawn, aligned"),
        ("bf16 and fp16, aligned, tuned", cases, lambda x: short(x, *ALIGNED)),
        ("permutations, untuned", drawn, lambda x: x["op"] == "permute"),
        ("permutations, tuned", tuned_permutations(cases), lambda x: True),
        ("bf16, `linear` with its epilogue", cases, lambda x: x["suite"] == "epilogue"),
        ("int4 weights, up to 16 rows", cases, lambda x: x["suite"] == "weights" and x["m"] <= 16
         and x["layout"].startswith("int4")),
        ("int4 weights, 256 and 4096 rows", cases, lambda x: x["suite"] == "weights" and x["m"] > 16
         and x["layout"].startswith("int4")),
        ("fp32, `fp16x3`", cases, lambda x: of(x, "fp32", "fp16x3")),
        ("fp32, `ieee`", cases, is_fp32),
        ("fp64, `ieee`", cases, lambda x: of(x, "fp64", "ieee")),
    )  # fmt: skip
    for name, found, wanted in kinds:
        count, mean, _, worst, _ = figures_of((x["ratio_torch"], sizes_label(x)) for x in found if wanted(x))
        yield name, count, mean, worst


def readme_table() -> str:
    """Return the table of README.md."""
    return table(HEAD, summary(stored([RESULTS], print)))


def main() -> None:
    """Write docs/benchmarks.md, then print the table of README.md."""
    benchmarks.write()
    print(readme_table(), end="")


if __name__ == "__main__":
    main()
