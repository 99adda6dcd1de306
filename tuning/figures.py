"""Write the pages of benchmarks, docs/index.md, three pictures, and the figures of README.md.

Run `python tuning/figures.py` when lines, shipped tables or records of GPU tests change; tests compare them
all. The pages' text, and which lines their tables show, are in pages/, as templates of jinja.
"""

import contextlib
import io
import os
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import jinja2

import benchmark_drawn as drawn
import benchmark_kinds as kinds
import plots
import report
import tritile
from benchmark_kinds import DEVICE, HERE, RESULTS
from benchmark_results import of_cases, stored
from benchmark_tables import Cells, Line, latest, measured_on, read, span, table
from tritile.choose import waves
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem, Tiled
from tritile.families.space import illegal
from tritile.tune.calibrate import draw as roof
from tritile.tuner.store.trials import Store
from unseen import environ, nothing_remembered

DOCS: Final = HERE.parent / "docs"
PAGES: Final = "benchmarks.md", "benchmark_details.md"
INDEX: Final = DOCS / "index.md"
LADDER: Final = "ladder.md"
README: Final = HERE.parent / "README.md"
TEMPLATES: Final = HERE / "pages"
STORES: Final = sorted((HERE / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz"))
# The first screen: the same lines, with what they are of.
FIRST_HEAD: Final = "on an H200, nothing tuned | torch's time / tritile's: | worst:"
FIRST_ROWS: Final = """
products with N or K not a multiple of 8 | kind == "random, ragged"
permutations | kind == "random, permutations"
all other products | kind == "random, aligned"
"""
README_HEAD: Final = "on one H200 | problems: | by time: | mean: | 5%: | worst:"
README_ROWS: Final = """
bf16, aligned, untuned | kind == "random, aligned"
the same, tritile's own kernels alone | kind == "random, aligned" | torch_us | triton_us
bf16, ragged, untuned | kind == "random, ragged"
permutations, untuned, a copy's time / tritile's | kind == "random, permutations" | copy_us | tritile_us
the same, 1-byte elements | kind == "random, permutations" and dtype == "uint8" | copy_us | tritile_us
permutations, untuned | kind == "random, permutations"
bf16 and fp16, aligned, tuned | short and suite in ALIGNED
bf16 and fp16, ragged, tuned | short and suite == "ragged"
permutations, tuned | op == "permute" and suite != "unseen"
bf16, `linear` with its epilogue | suite == "epilogue"
int4 weights, up to 16 rows | suite == "weights" and m <= 16 and layout.startswith("int4")
int4 weights, 256 and 4096 rows | suite == "weights" and m > 16 and layout.startswith("int4")
fp32, `precision="fp16x3"` | suite == "fp32" and precision == "fp16x3"
fp64, `ieee` | suite == "fp64" and precision == "ieee"
"""


def recorded(path: Path, failures: bool = False) -> dict[Tiled, dict[Config, float]]:
    """Return the microseconds of the legal configs in a store; with `failures` infinity for failed ones."""
    found: dict[Tiled, dict[Config, float]] = {}
    for _, trial in Store(DEVICE).of_file(path):
        if (trial.works or failures) and illegal(trial.config, trial.problem, DEVICE) is None:
            found.setdefault(trial.problem, {})[trial.config] = trial.time
    return found


def predictions(stores: Iterable[Path]) -> Iterator[Cells]:
    """Yield the median error of predicted times, by store of trials and by operation."""
    for path in stores:
        kinds: dict[str, tuple[list[float], list[float]]] = {}
        for problem, times in recorded(path).items():
            kind = "products" if isinstance(problem, MatmulProblem) else "permutations"
            off = {one: abs(waves.predict_us(one, problem, DEVICE) / us - 1) for one, us in times.items()}
            everything, fastest = kinds.setdefault(kind, ([], []))
            everything += off.values()
            fastest.append(off[min(times, key=lambda config, times=times: times[config])])
        for kind, of_both in kinds.items():
            yield path.name, kind, *(f"{statistics.median(values):.0%}" for values in of_both)


def environment(cases: list[Line]) -> jinja2.Environment:
    """Return what renders the pages."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["spans"] = lambda text: table(kinds.SPAN_HEAD, kinds.spans(cases, text)) + "\n"
    return made


def printed(page: str) -> str:
    """Return what the snippets of a page print, without settings. Tensors have no data, so no kernel runs."""
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = re.sub(r'"cuda"( if torch.cuda.is_available\(\) else "cpu")?', '"meta"', "\n".join(snippets))
    tritile.forget()
    unset: dict[str, None] = dict.fromkeys(name for name in os.environ if name.startswith("TRITILE_"))
    with environ(**unset), nothing_remembered(), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    tritile.forget()
    return out.getvalue().rstrip("\n")


def index() -> str:
    """Return the first page of the documents."""
    cases = [kinds.told(line) for line in of_cases(stored([RESULTS], print))]

    def speedup(condition: str) -> dict[str, str]:
        ((_, *found),) = kinds.summary(cases, f"all | {condition}")
        return dict(zip(("count", "by_time", "mean", "low", "worst"), found, strict=True))

    output = printed((TEMPLATES / "index.md").read_text())
    return environment(cases).get_template("index.md").render(speedup=speedup, output=output)


def page(name: str, results: Path = HERE / "results", stores: Iterable[Path] = STORES) -> str:
    """Return one of `PAGES`."""
    lines = stored([RESULTS], print)
    cases = [kinds.told(line) for line in of_cases(lines)]
    return environment(cases).get_template(name).render(
        drawn=drawn, kinds=kinds, roof=roof, results=results, lines=lines, cases=cases,
        table=table, measured_on=measured_on, median=statistics.median,
        answers=README_ROWS,
        predictions=lambda: predictions(stores),
        pick=lambda condition: kinds.picked(cases, condition),
        span=lambda values: " | ".join(span(values)),
        ladder=read(RESULTS / "ladder.json"),
        autotune=read(RESULTS / "autotune.json"),
        geomean=statistics.geometric_mean,
        adopted=[x for x in latest(read(RESULTS / "adopted.jsonl"), ["case"]) if "ratio" in x],
    )  # fmt: skip


def readme() -> str:
    """Return README.md with what its demo prints, and with its table."""
    text = README.read_text()
    cases = [kinds.told(line) for line in of_cases(stored([RESULTS], print))]
    first = ((name, weighted, worst) for name, _, weighted, *_, worst in kinds.summary(cases, FIRST_ROWS))
    for head, cells in ((FIRST_HEAD, first), (README_HEAD, kinds.summary(cases, README_ROWS))):
        rows = table(head, cells) + "\n"
        title = rows.partition("\n")[0]
        text = re.sub(rf"^{re.escape(title)}\n(\|.*\n)*", lambda _, new=rows: new, text, flags=re.MULTILINE)
    call = [line for line in read(RESULTS / "host.jsonl") if line["call"] == "matmul(a, b)"][-1]
    text = re.sub(
        r"takes [\d.]+ us of the host's time, torch's [\d.]+ us",
        f"takes {call['tritile_us']:.1f} us of the host's time, torch's {call['torch_us']:.1f} us",
        text,
    )
    output = f"```text\n{printed(text)}\n```\n"
    return re.sub(r"^```text\n.*?^```\n", lambda _: output, text, flags=re.MULTILINE | re.DOTALL)


def ladder() -> str:
    """Return the page of the ladder with the times and bytes of its rungs."""
    sections = re.split(r"(?=^## )", (DOCS / LADDER).read_text(), flags=re.MULTILINE)
    for op, title in (("matmul", "## Product"), ("transpose", "## Transpose")):
        i = next(i for i, section in enumerate(sections) if section.startswith(title))
        before = None
        for rung in read(RESULTS / "ladder.json")["readings"]:
            if rung["op"] != op or rung["name"].startswith("torch"):
                continue
            us, bytes_ = rung["us"], rung["requested"]
            traffic = f"{bytes_ / 1e9:.1f} | {bytes_ / us / 1e6:.2f} |" if bytes_ else "| |"
            row = f"| {rung['name']} | {f'{before / us:.1f} ' if before else ''}| {us / 1e3:.2f} | {traffic}"
            sections[i] = re.sub(rf"^\| {re.escape(rung['name'])} \|.*", row, sections[i], flags=re.MULTILINE)
            before = us
    return "".join(sections)


def ratios() -> str:
    """Return the picture of each problem compared with its baseline, on the page of benchmarks."""
    results = stored([HERE / "results"], print)
    return report.picture(report.rows_of(results, DEVICE.name))


def main() -> None:
    """Write the pages and the pictures."""
    for name in PAGES:
        (DOCS / name).write_text(page(name))
    INDEX.write_text(index())
    README.write_text(readme())
    (DOCS / LADDER).write_text(ladder())
    plots.PICTURE.write_text(plots.picture())
    plots.ODD.write_text(plots.odd_sizes())
    report.PICTURE.write_text(ratios())


if __name__ == "__main__":
    main()
