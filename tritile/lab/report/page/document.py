"""Turn rows into a file: an HTML page that loads nothing else, or a picture of one figure."""

import functools
import json
from pathlib import Path
from typing import Any, Final

import jinja2
import vl_convert

from tritile.errors import FileError, InvalidValueError
from tritile.lab.report.page import charts
from tritile.lab.report.page.figures import FIGURES, headline, summary_table, table
from tritile.lab.report.page.rows import FACETS, Row, Rows, kinds
from tritile.lab.report.results import BASELINES

_PAGES: Final = Path(__file__).parents[1] / "pages"
_WIDTH: Final = 900
_EMBEDDED: Final = ("results", "searches", "cells", "progress")


def _packed(rows: list[Row]) -> dict[str, Any]:
    """Pack rows by columns, texts as numbers of a list: a fifth of the size."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(value, str) for value in values):
            numbers = {text: number for number, text in enumerate(dict.fromkeys(values))}
            columns[name] = {"words": list(numbers), "at": [numbers[value] for value in values]}
        else:
            columns[name] = values
    return {"count": len(rows), "columns": columns}


def _options(rows: Rows) -> dict[str, list[str]]:
    """Return the values to choose from, by facet."""
    found = {facet: kinds([*rows.results, *rows.searches], facet) for facet in FACETS}
    found["baseline"] = [name for name in ("torch", *BASELINES) if any(row[name] for row in rows.results)]
    return found


def _compiled(name: str, rows: Rows) -> dict[str, Any]:
    """Compile a figure to Vega for each theme, so that the page need not, and warns of nothing."""
    spec, styles = FIGURES[name].spec(rows), {"light": charts.LIGHT, "dark": charts.DARK}
    return {theme: vl_convert.vegalite_to_vega(spec | {"config": style}) for theme, style in styles.items()}


@functools.cache
def _vega() -> str:
    """Return the script that draws figures, which takes a second to bundle.

    What could end a script element, or begin a comment, is escaped.
    """
    source: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def html(rows: Rows) -> str:
    """Return the page: figures, tables, filters, and the scripts that draw them.

    Raises FileError where there is nothing to show.
    """
    if not rows.results and not rows.searches:
        raise FileError(
            f"there are no results and no trials of {rows.gpu}: tritile bench --output DIR and tritile tune "
            "make them"
        )
    drawn = [name for name, figure in FIGURES.items() if figure.select(rows)]
    figures = [{"name": name, "data": FIGURES[name].data, "spec": _compiled(name, rows)} for name in drawn]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates.get_template("report.html").render(
        rows=rows,
        headline=headline(rows),
        figures=FIGURES,
        drawn=drawn,
        order=sorted(FIGURES, key=lambda name: name not in drawn),
        summary=summary_table(rows.summaries),
        hosts=table(
            "What a call costs the host, in microseconds",
            ("call", "tritile_us", "torch_us", "ratio_torch"),
            rows.hosts,
        ),
        options=_options(rows),
        data={"rows": {name: _packed(getattr(rows, name)) for name in _EMBEDDED}, "figures": figures},
        vega=_vega(),
    )


def check_picture(name: str, kind: str) -> None:
    """Raise InvalidValueError for an unknown figure, or a picture that is neither svg nor png."""
    if name not in FIGURES:
        raise InvalidValueError(f"no figure {name!r}: there are {', '.join(FIGURES)}")
    if kind not in ("svg", "png"):
        raise InvalidValueError(f"a picture of kind {kind!r}: wanted .svg or .png")


def picture(name: str, rows: Rows, kind: str, problem: str = "") -> bytes:
    """Draw one figure, as SVG with a light and a dark scheme or as a light PNG (`kind`).

    `problem` is part of the name of the problem that the heat map shows. Raises InvalidValueError for an
    unknown figure, kind or problem, and FileError for a figure that has nothing to show.
    """
    check_picture(name, kind)
    figure = FIGURES[name]
    if not figure.select(rows):
        raise FileError(f"figure {name}: {figure.nothing}")
    room = {"left": 32, "right": 32, "top": 12, "bottom": 12}  # as readers' fonts may be wider
    spec = figure.spec(rows) | {"width": _WIDTH, "padding": room}
    shown = getattr(rows, figure.data)
    if name == "heatmap":
        chosen = next((row for row in rows.searches if row["mapped"] and problem in row["problem"]), None)
        if chosen is None:
            raise InvalidValueError(f"--problem {problem!r}: nothing searched has that in its name")
        shown = [row for row in shown if row["s"] == chosen["s"]]
        axes = f"{chosen['problem']}: {chosen['down']} (down) by {chosen['across']} (across)"
        spec["params"] = [p | {"value": axes} if p["name"] == "axes" else p for p in spec["params"]]
    spec["datasets"] = spec.get("datasets", {}) | {figure.data: shown}
    spec["config"] = charts.LIGHT | {"background": "white", "font": "sans-serif"}
    text = json.dumps(spec, allow_nan=False)
    if kind == "svg":
        return charts.with_the_dark(vl_convert.vegalite_to_svg(text)).encode()
    return bytes(vl_convert.vegalite_to_png(text, scale=2))
