"""Lay rows out as a table that fits a narrow terminal: words fold at spaces, and nothing is cut."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

Row = Mapping[str, str | Text]  # cells by the names of columns; a str folds at spaces where room is short


def number(value: object, form: str = "", bad: bool = False) -> Text:
    """Return a cell that stands to the right and stays whole; empty for None, red where `bad`."""
    text = "" if value is None else format(value, form)
    return Text(text, style="bold red" if bad else "", justify="right")


def whole(text: str) -> Text:
    """Return words that stay in one line."""
    return Text(text, justify="left")


def table(
    rows: Sequence[Row], title: str = "", same: Iterable[str] = (), styles: Sequence[str] = ()
) -> Group:
    """Return rows, one or more, as a table; `styles` has the style of each.

    Columns of `same` whose value is the same in all rows move to the title.
    """
    words, names = [title], list(rows[0])
    for name in same:
        if len({str(row[name]) for row in rows}) == 1:
            cell = rows[0][name]
            words.append(f"{name} {cell}" if isinstance(cell, Text) else cell)
            names.remove(name)
    heading = Text(", ".join(filter(None, words)), style="bold")
    fitted = _Fitted([{name: row[name] for name in names} for row in rows], styles or [""] * len(rows))
    return Group(heading, fitted) if heading else Group(fitted)


class _Fitted:
    """Print rows as a table where each word has room; on a narrower terminal each row as a line of words."""

    def __init__(self, rows: Sequence[Row], styles: Sequence[str]) -> None:
        self._rows, self._styles = rows, styles

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = {name: self._longest_word(name) for name in self._rows[0]}
        gap = 2 if sum(least.values()) + 2 * len(least) <= options.max_width else 1
        if sum(least.values()) + gap * len(least) > options.max_width:
            for row, style in zip(self._rows, self._styles, strict=True):
                first, *rest = row.items()
                words = [str(first[1]), *(f"{name} {cell}".strip() for name, cell in rest if str(cell))]
                yield Text(", ".join(filter(None, words)), style, overflow="fold")
            return
        made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
        for name, cell in self._rows[0].items():
            made.add_column(name, justify=getattr(cell, "justify", "left"), min_width=least[name])
        for row, style in zip(self._rows, self._styles, strict=True):
            cells = (cell if isinstance(cell, Text) else Text(cell) for cell in row.values())
            made.add_row(*cells, style=style)
        yield made

    def _longest_word(self, name: str) -> int:
        cells = [name, *(row[name] for row in self._rows)]
        return max(
            len(word)
            for cell in cells
            for word in ([cell] if isinstance(cell, Text) else cell.split() or [""])
        )
