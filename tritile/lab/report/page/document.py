"""Turn rows into a file: an HTML page that loads nothing else, or a picture of one figure."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from tritile.errors import InvalidValueError, UnsupportedError
from tritile.lab.report.page.rows import FACETS, Row, Rows
from tritile.lab.report.results import BASELINES
from tritile.lab.report.summary import geomean

_EXTRA: Final = ("altair", "vl_convert", "jinja2")
_PAGES: Final = Path(__file__).parents[1] / "pages"
_WIDTH: Final = 900
_EMBEDDED: Final = ("results", "searches", "cells", "progress", "study")
_NONE: Final = {
    "results": "No such results: tritile bench --results DIR measures problems and writes them.",
    "cells": "No trials: tritile tune makes them, and --store FILE shows those of another machine.",
    "progress": "No trials: tritile tune makes them, and --store FILE shows those of another machine.",
    "study": "No study: tritile tune --study makes one.",
}


def check_extra() -> None:
    """Raise UnsupportedError where packages that reports need are missing."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"a report needs {', '.join(missing)}: pip install 'tritile[report]'")


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


def _drawn(name: str, rows: Rows) -> bool:
    """Tell whether there are rows that the figure would show."""
    op = {"roofline": "matmul", "accuracy": "matmul", "bandwidth": "permute"}.get(name)
    from tritile.lab.report.page.figures import FIGURES

    return any(op is None or row["op"] == op for field in FIGURES[name].data for row in getattr(rows, field))


def _options(rows: Rows) -> dict[str, list[str]]:
    """Return the values to choose from, by facet."""
    found: dict[str, list[str]] = {}
    for facet in FACETS:
        values: set[str] = set()
        for row in (*rows.results, *rows.searches):
            values |= set(row[facet]) if isinstance(row[facet], list) else {row[facet]}
        found[facet] = sorted(values - {""})
    found["peer"] = [name for name in ("torch", *BASELINES) if any(row[name] for row in rows.results)]
    return found


def _cards(rows: Rows) -> list[Row]:
    """Summarise all results, then each suite, against torch: count, geometric mean and worst problem."""
    suites: dict[str, list[Row]] = {"": rows.results} if rows.results else {}
    for row in rows.results:
        suites.setdefault(row["suite"], []).append(row)
    return [{"suite": suite, **_card(own)} for suite, own in suites.items()]


def _card(own: list[Row]) -> Row:
    worst = min(own, key=lambda row: row["torch"])
    return {
        "count": len(own),
        "geomean": geomean(row["torch"] for row in own),
        "ahead": sum(row["torch"] >= 1 for row in own),
        "worst": worst["torch"],
        "at": f"{worst['problem']} {worst['layout']} {worst['dtype']}".replace("  ", " "),
    }


def _compiled(name: str, rows: Rows) -> dict[str, Any]:
    """Compile a figure to Vega for each theme, so that the page need not, and warns of nothing."""
    import vl_convert

    from tritile.lab.report.page import themes
    from tritile.lab.report.page.figures import spec_of

    spec = spec_of(name, rows)
    styles = {"light": themes.LIGHT, "dark": themes.DARK}
    return {theme: vl_convert.vegalite_to_vega(spec | {"config": style}) for theme, style in styles.items()}


def _script(source: str) -> str:
    """Escape what could end a script element, or begin a comment, in JavaScript."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@functools.cache
def _vega() -> str:
    """Return the script that draws figures, which takes a second to bundle."""
    import vl_convert

    return _script(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def html(rows: Rows) -> str:
    """Return the page: figures, tables, filters, and the scripts that draw them.

    Raises UnsupportedError where a package is missing, and InvalidValueError where there is nothing to show.
    """
    check_extra()
    if not rows.results and not rows.searches:
        raise InvalidValueError(
            f"there are no results and no trials of {rows.gpu}: tritile bench --results DIR and tritile tune "
            "make them"
        )
    import jinja2

    from tritile.lab.report.page import tables
    from tritile.lab.report.page.figures import FIGURES

    sections: list[dict[str, Any]] = []
    for name, figure in FIGURES.items():
        drawn = _drawn(name, rows)
        sections.append({
            "name": name, "title": figure.title, "shows": figure.shows, "drawn": drawn,
            "nothing": _NONE[figure.data[0]], "table": tables.table_of(name, rows) if drawn else None,
        })  # fmt: skip
    data = {
        "rows": {name: _packed(getattr(rows, name)) for name in _EMBEDDED},
        "figures": [
            {"name": s["name"], "data": FIGURES[s["name"]].data[0], "spec": _compiled(s["name"], rows)}
            for s in sections
            if s["drawn"]
        ],
    }  # fmt: skip
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates.get_template("report.html").render(
        rows=rows,
        cards=_cards(rows),
        sections=sections,
        summary=tables.summary_table(rows.summaries),
        others=tables.others(rows),
        options=_options(rows),
        data=data,
        vega=_vega(),
    )


def _searched(rows: Rows, text: str) -> int:
    """Return the number of the first search with `text` in its problem's name, or raise InvalidValueError."""
    found = [row["s"] for row in rows.searches if row["mapped"] and text in row["problem"]]
    if not found:
        raise InvalidValueError(f"--problem {text!r}: nothing searched has that in its name")
    return int(found[0])


def check_picture(name: str, kind: str) -> None:
    """Raise InvalidValueError for an unknown figure, or a picture that is neither svg nor png."""
    from tritile.lab.report.page.figures import FIGURES

    if name not in FIGURES:
        raise InvalidValueError(f"no figure {name!r}: there are {', '.join(FIGURES)}")
    if kind not in ("svg", "png"):
        raise InvalidValueError(f"a picture of kind {kind!r}: wanted .svg or .png")


def picture(name: str, rows: Rows, kind: str, problem: str = "") -> bytes:
    """Draw one figure on a light background, as SVG or PNG (`kind`).

    `problem` is part of the name of the problem that the heat map shows. Raises InvalidValueError for an
    unknown figure or kind, or a figure that has nothing to show.
    """
    check_extra()
    check_picture(name, kind)
    import vl_convert

    from tritile.lab.report.page.figures import FIGURES, spec_of
    from tritile.lab.report.page.themes import LIGHT

    if not _drawn(name, rows):
        raise InvalidValueError(f"figure {name}: {_NONE[FIGURES[name].data[0]]}")
    spec = spec_of(name, rows) | {"width": _WIDTH, "padding": 12}
    field = FIGURES[name].data[0]
    shown = getattr(rows, field)
    if name == "heatmap":
        number = _searched(rows, problem)
        chosen, shown = rows.searches[number], [row for row in shown if row["s"] == number]
        axes = f"{chosen['problem']}: {chosen['down']} (down) by {chosen['across']} (across)"
        spec["params"] = [p | {"value": axes} if p["name"] == "axes" else p for p in spec["params"]]
    spec["datasets"] = spec.get("datasets", {}) | {field: shown}
    spec["config"] = LIGHT | {"background": "white", "font": "sans-serif"}
    text = json.dumps(spec, allow_nan=False)
    if kind == "svg":
        return str(vl_convert.vegalite_to_svg(text)).encode()
    return bytes(vl_convert.vegalite_to_png(text, scale=2))
