"""Results in a notebook, shown as a table."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tritile.core.config import Config
from tritile.core.markup import table_html
from tritile.lab.report.results import Result
from tritile.lab.report.run import stored
from tritile.lab.report.summary import baselines_of, dtype_label, of_cases, sizes_label

_MOST: Final = 500  # rows shown: a notebook keeps what it shows
_HEADS: Final = ("problem", "suite", "dtype", "layout", "tritile us", "torch us", "over torch")


def _texts(line: Result, baselines: list[str]) -> list[str]:
    ratios = [line.get(f"ratio_{name}") for name in baselines]
    return [
        sizes_label(line),
        line["suite"],
        dtype_label(line["dtype"], line.get("precision") or ""),
        line.get("layout") or "",
        f"{line['tritile_us']:.2f}",
        f"{line['torch_us']:.2f}",
        f"{line['ratio_torch']:.3f}",
        *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        f"{line['spread']:.1%}",
        str(Config.from_dict(line["config"])),
    ]


class Results(list[Result]):
    """Hold results as `lab.report.results.read` returns them; Jupyter shows a table with each case once."""

    @classmethod
    def of(cls, *places: Path | str, tell: Callable[[str], None] = print) -> "Results":
        """Read the results of files, and of the .jsonl files in folders and in the folders in them.

        `tell` is told of lines that are no results. Raises InvalidValueError if there is no file to read.
        """
        return cls(stored([Path(place) for place in places], tell))

    def _repr_html_(self) -> str:
        lines = of_cases(self)
        baselines = baselines_of(lines)
        heads = [*_HEADS, *(f"over {name}" for name in baselines), "spread", "config"]
        gpus = ", ".join(dict.fromkeys(line["env"]["gpu"] for line in lines)) or "no GPU"
        more = f"; the first {_MOST} are shown" if len(lines) > _MOST else ""
        rows = (_texts(line, baselines) for line in lines[:_MOST])
        return table_html(f"{len(lines)} results of {gpus}{more}", heads, rows)
