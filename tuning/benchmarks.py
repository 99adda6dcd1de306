"""Write docs/benchmarks.md from the committed lines; `python tuning/figures.py` calls it."""

from pathlib import Path

import benchmark_drawn
import benchmark_losses as losses
import benchmark_studies as studies
import benchmark_tuned as tuned
from benchmark_tables import measured_on, table
from tritile.lab.report.results import Result, stored
from tritile.lab.report.summary import of_cases

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

This page helps you judge how fast and how exact tritile is on your kind of problem.

`python tuning/figures.py` writes the whole page from the lines in `tuning/results/`, `tuning/accuracy/`,
`tuning/llama/` and `tuning/trials/`. Do not edit it by hand.

## How to read the tables

- A ratio is the baseline's time divided by tritile's: above 1 tritile is faster. The baseline is torch as
  it comes, unless a row names another. "max-autotune" is torch.compile with that mode, which searches the
  kernels of cuBLAS and Triton on the same operands.
- "under 1" counts the problems on which tritile is slower. "worst" is the lowest ratio, "5%" the 5th
  percentile.
- NN, NT, TN and TT say how a and b lie: N is row by row, T is column by column.
- Sizes are *tuned* where the shipped table holds the winner of a search for just this size. Elsewhere
  tritile predicts a config.
- Both sides run in CUDA graphs and take turns in one process. The operands of one round exceed the L2
  cache.
- A neutral kernel runs before each launch, so that no kernel starts early behind one of its own kind. The
  tuned suites and draw 9ca5e47a were timed without the neutral kernel. Their ratios for small launches
  are too high: permutations and the families `descriptor`, `warpgroups` and `split` start early
  (programmatic dependent launch).

`tritile bench --suite NAME --results tuning/results/GPU` adds lines to a suite. A line names its GPU,
versions and commit.
"""


def section(title: str, about: str, *parts: str) -> str:
    """Return a section: a heading, a paragraph, and its tables and pictures."""
    return "\n".join((f"\n## {title}\n", about, *(f"\n{part.rstrip()}" for part in parts), ""))


def of_losses(results: Path) -> str:
    """Return the section of kinds whose geometric mean is under 1."""
    about = """\
Every kind of problem whose geometric mean is under 1, and what to use for it. "one weight" and "models" are
the sections above."""
    return section("Where torch is faster", about, table(losses.HEAD, losses.rows(results)))


def of_untuned(cases: list[Result]) -> str:
    """Return the section of sizes that were not tuned."""
    about = """\
"drawn" is all draws of the section above. "invariance" multiplies two weights, 4096x4096 and 14336x4096,
with 1 to 4096 rows (`python tuning/invariance.py`); sizes in the shipped table have a row of their own.
"""
    about = (about + tuned.one_by_one()).rstrip()
    return section(
        "Untuned sizes on an H200",
        about,
        table(tuned.HEAD, tuned.untuned_rows(cases)),
        "Aligned products of drawn sizes, by the alignment of the rows of a and b and by tritile's time:",
        table(tuned.SPAN_HEAD, tuned.spans(cases, tuned.DRAWN_SPANS)),
    )


def of_tuned(cases: list[Result]) -> str:
    """Return the section of plain operations at tuned sizes."""
    lines = [line for line in cases if line["suite"] in tuned.PLAIN]
    return section(
        "Tuned sizes on an H200",
        measured_on(lines),
        table(tuned.HEAD, tuned.plain_rows(cases)),
        "![Each problem beside its baseline: right of 1 tritile is faster](../tuning/pictures/speedups.svg)",
        f"{tuned.below(cases)} In 16 bits, ratios unless a row names a rate:",
        table(tuned.SPAN_HEAD, tuned.spans(cases, tuned.PLAIN_SPANS)),
        "Time of 8191x8191x8191 by that of 8192x8192x8192:",
        table("dtype | layout | ratio:", tuned.cubes(cases)),
    )


def of_other(cases: list[Result]) -> str:
    """Return the section of other types and fused operations."""
    lines = [line for line in cases if line["suite"] not in (*tuned.PLAIN, tuned.DRAWN)]
    untuned = sum(line["plan_source"] == "model" for line in lines)
    older = sum("torch_call" not in line for line in lines)
    before = f"{older} lines are older, and have the first of these ways alone. " if older else ""
    about = f"""\
Torch's side is the fastest of its ways, which a line names:

- epilogue: torch's calls one by one (`linear`, then the activation), or the same by torch.compile;
- gated: two products, one product with both weights side by side, or that by torch.compile;
- scaled: `_scaled_mm`, its sums kept where tritile's are; `_int_mm`, and with scales four more calls, which
  read and write the sums in fp32, or the same by torch.compile;
- weights: a product by the same weight in bf16, or `_weight_int4pack_mm` for int4;
- grouped: `torch._grouped_mm`.

{before}All but {untuned} of these {len(lines)} problems were tuned.

{measured_on(lines)}"""
    return section(
        "Other types and fused operations on an H200",
        about,
        table(tuned.HEAD, tuned.other_rows(cases)),
        "Ratios and errors in more detail:",
        table(tuned.SPAN_HEAD, tuned.spans(cases, tuned.OTHER_SPANS)),
    )


def of_permutations(cases: list[Result]) -> str:
    """Return the section of permutations at tuned sizes."""
    about = f"""\
Rates of tuned permutations. "large copy": the rate by that of a copy of 8192x8192 elements of bfloat16,
which runs at {tuned.large_copy_gbps(cases):.0f} GB/s. "own copy": by that of a copy of as many bytes.
"small" is less than 64 MiB.
Index arithmetic limits odd permutations of rank 5 and 6 with short elements."""
    return section(
        "Permutations on an H200",
        about,
        table("kind | problems: | large copy: | own copy: | worst: | at", tuned.permutations(cases)),
        "Two transposes, in us:",
        table("shape | dtype | tritile: | torch: | rate by the large copy:", tuned.transposes(cases)),
    )


def of_host(lines: list[Result]) -> str:
    """Return the section of what calls cost the host, and of batch invariance."""
    invariant = section(
        "Batch invariance on an H200",
        "Time inside `tritile.batch_invariant()` by the time outside: products of 1 to 4096 rows by weights\n"
        "of 4096x4096 and 14336x4096. Below 1 the config outside was predicted, and is a poor one.\n"
        + tuned.one_by_one().rstrip(),
        table(tuned.SPAN_HEAD.replace("figure", "weight"), tuned.costs_of_invariance()),
    )
    return invariant + section(
        "Host time of a call",
        "Torch's host time by tritile's, over all runs.",
        table("call | least: | most: | geometric mean: | runs:", tuned.host_costs(lines)),
    )


def of_errors() -> str:
    """Return the section of errors."""
    about = f"""\
tritile's error / torch's, of the norm, for products of 512x512 with sums of {studies.DEPTH} terms
(`tritile accuracy`). The exact product is computed with a mantissa of 64 bits for 64-bit types, in fp64
for others. `tuning/accuracy/` also has sums of 1024 terms, the worst elements and special values.

{measured_on(studies.accuracy_lines())}"""
    return section(
        "Errors on an H200", about, table(" | ".join(("precision", *studies.DATA)), studies.errors())
    )


def of_llama() -> str:
    """Return the section of the Llama models."""
    about = f"""\
Tokens a second without and with `use_in_torch` (`python tuning/llama.py`). "even" has the sizes of Llama
3.2 1B, "odd" a vocabulary of 50,257 and rows of 1500 and 4001. Two figures of the odd model are of an
older tritile, which passed more calls through to torch: decoding at batch 16 in eager code, and prefill
under torch.compile.

{measured_on(studies.llama_lines())}"""
    return section(
        "Llama models on an H200",
        about,
        table(
            "task | even: torch: | tritile: | ratio: | odd: torch: | tritile: | ratio:",
            studies.llama(),
        ),
        "Errors of the odd model beside a copy in fp32:",
        table("of | torch: | tritile:", studies.llama_errors()),
    )


def of_ladder() -> str:
    """Return the section of the ladder."""
    n = studies.ladder()["n"]
    about = f"""\
Kernels from a naive one to tritile's own, one idea each, at {n}x{n} (`tritile ladder`). "asked" is what
loads and stores ask of memory, caches aside.

{measured_on([studies.ladder()])}"""
    head = "operation | kernel | idea | dtype | ms: | asked, GB:"
    return section("The ladder on an H200", about, table(head, studies.ladder_rows()))


def of_tuner() -> str:
    """Return the sections of `tritile.autotune`, the search and the model."""
    seconds = "triton, s: | tritile, list, s: | tritile, space, s:"
    times = "triton, us: | list, us: | space, us:"
    autotune = section(
        "`tritile.autotune` beside `triton.autotune`",
        "Seconds of a first call: nothing is compiled, tritile starts its processes, and `reference` checks\n"
        'its answers. Then microseconds of the chosen config. "list" is triton\'s list of configs, "space"\n'
        "a `tritile.Space` (`python tuning/compare_autotune.py`).\n\n"
        + measured_on(studies.autotune_lines()),
        table(f"kernel | problem | {seconds} | {times}", studies.autotune()),
        "Microseconds that a warm call takes the host:",
        table("kernel | bare: | triton.autotune: | tritile.autotune:", studies.autotune_host()),
    )
    study = section(
        "How good searches are",
        "`tritile tune --study` searches with nothing known and nothing compiled, five times a problem, and\n"
        "measures the whole space.\n\n" + measured_on([studies.study()]),
        table("figure | value", studies.study_rows()),
    )
    predictions = section(
        "How far predicted times are off",
        "Median over the trials of each committed store (`tuning/trials`), and over the fastest config of\n"
        "each problem.",
        table("store | operation | all configs: | fastest:", studies.predictions()),
    )
    return autotune + study + predictions


def page(results: Path = HERE / "results") -> str:
    """Return the whole page."""
    lines = stored([tuned.RESULTS], print)
    cases = of_cases(lines)
    measured = (of_untuned, of_tuned, of_other, of_permutations)
    return "".join((
        HEAD, benchmark_drawn.sections(results), of_losses(results), *(made(cases) for made in measured),
        of_host(lines), of_errors(), of_llama(), of_ladder(), of_tuner(),
    ))  # fmt: skip


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())
