"""The tables of README.md say what the committed lines say."""

from pathlib import Path

import figures
from tritile.lab.report.run import stored

README = Path(figures.HERE).parent / "README.md"


def tables_of(text):
    """The rows of each table of README.md whose head is that of `figures`."""
    parts = text.split(f"{figures.HEAD}\n{figures.RULE}\n")[1:]
    return [part.split("\n\n")[0].splitlines() for part in parts]


def test_the_readme_has_the_tables_of_the_committed_lines():
    wrong = []
    expected = figures.tables(stored([figures.RESULTS], wrong.append))
    assert not wrong
    assert tables_of(README.read_text()) == expected


def test_sizes_that_are_not_in_the_table_count_as_untuned():
    kinds = {at: kind[0] for kind, _, at in figures.by_table()}
    assert kinds["64x4096x4096"] == "invariance, tuned sizes"
    assert kinds["65x4096x4096"] == "invariance, **untuned** sizes"
