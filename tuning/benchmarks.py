"""Write docs/benchmarks.md from pages/benchmarks.md and the committed lines; `tuning/figures.py` calls it."""

from pathlib import Path

import jinja2

import benchmark_drawn as drawn
import benchmark_losses as losses
import benchmark_studies as studies
import benchmark_tuned as tuned
from benchmark_tables import measured_on, table
from tritile.lab.report.results import stored
from tritile.lab.report.summary import of_cases

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
TEMPLATE = HERE / "pages" / "benchmarks.md"


def page(results: Path = HERE / "results") -> str:
    """Return the whole page. A table ends without a new line in the template."""
    lines = stored([tuned.RESULTS], print)
    cases = of_cases(lines)
    template = jinja2.Template(TEMPLATE.read_text(), keep_trailing_newline=True)
    return template.render(
        drawn=drawn, losses=losses, studies=studies, tuned=tuned, measured_on=measured_on,
        table=lambda head, rows: table(head, rows).rstrip(), results=results, lines=lines, cases=cases,
        plain=[line for line in cases if line["suite"] in tuned.PLAIN],
        others=[line for line in cases if line["suite"] not in (*tuned.PLAIN, tuned.DRAWN)],
        ladder=studies.ladder(),
    )  # fmt: skip


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())
