"""Results in a notebook, shown as a table."""

from pathlib import Path
from typing import Final

from tritile.core.markup import table_html
from tritile.lab.report.results import Result, Tell, stored
from tritile.lab.report.summary import baselines_of, columns, of_cases

_MOST: Final = 500  # rows shown: a notebook keeps what it shows


class Results(list[Result]):
    """Hold results as `lab.report.results.read` returns them; Jupyter shows a table with each case once."""

    @classmethod
    def of(cls, *places: Path | str, tell: Tell = print) -> "Results":
        """Read the results of files, and of the .jsonl files in folders and in the folders in them.

        `tell` is told of lines that are no results. Raises InvalidValueError if there is no file to read.
        """
        return cls(stored([Path(place) for place in places], tell))

    def _repr_html_(self) -> str:
        lines = of_cases(self)
        baselines = baselines_of(lines)
        rows = [columns(line, baselines) for line in lines[:_MOST]]
        gpus = ", ".join(dict.fromkeys(line["env"]["gpu"] for line in lines)) or "no GPU"
        more = f"; the first {_MOST} are shown" if len(lines) > _MOST else ""
        title = f"{len(lines)} results of {gpus}{more}"
        return table_html(title, list(rows[0]) if rows else [], (list(row.values()) for row in rows))
