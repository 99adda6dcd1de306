"""Lay rows out as a table that fits a narrow terminal: words fold at spaces, and nothing is cut."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

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


def shared_by(rows: Sequence[Row], names: Iterable[str]) -> dict[str, str]:
    """Return the columns among `names` that have one value in all rows, with words for it."""
    found = {}
    for name in names:
        values = {str(row[name]) for row in rows}
        if len(values) == 1:
            found[name] = f"{name} {values.pop()}" if isinstance(rows[0][name], Text) else values.pop()
    return found


def table(
    rows: Sequence[Row], title: str = "", same: Iterable[str] = (), styles: Sequence[str] = ()
) -> Group:
    """Return rows, one or more, as a table; `styles` has the style of each.

    Columns of `same` whose value is the same in all rows move to the title.
    """
    moved = shared_by(rows, same)
    heading = Text(", ".join(filter(None, (title, *moved.values()))), style="bold")
    names = [name for name in rows[0] if name not in moved]
    fitted = _Fitted([{name: row[name] for name in names} for row in rows], styles or [""] * len(rows))
    return Group(heading, fitted) if heading else Group(fitted)


class _Fitted:
    """Print rows as a table where each word has room; on a narrower terminal each row as a line of words."""

    def __init__(self, rows: Sequence[Row], styles: Sequence[str]) -> None:
        self._rows, self._styles = rows, styles

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least, wanted = self._least_and_wanted()
        spare, gap = options.max_width - sum(least.values()), 2
        if spare < gap * len(least):
            gap = 1
        if spare < gap * len(least):
            yield from self._lines()
            return
        widths = _shared_out(spare - gap * len(least), least, wanted)
        made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
        for name, cell in self._rows[0].items():
            made.add_column(name, justify=getattr(cell, "justify", "left"), width=widths[name])
        for row, style in zip(self._rows, self._styles, strict=True):
            made.add_row(*(_text(cell) for cell in row.values()), style=style)
        yield made

    def _lines(self) -> Iterator[Text]:
        """Yield a line of each row: its first cell, then the others behind their names."""
        for row, style in zip(self._rows, self._styles, strict=True):
            first, *rest = row.items()
            told = [str(first[1]), *(f"{name} {cell}".strip() for name, cell in rest if str(cell))]
            yield Text(", ".join(filter(None, told)), style, overflow="fold")

    def _least_and_wanted(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the widths of each column's longest word and longest line; a Text is one word."""
        least, wanted = {}, {}
        for name in self._rows[0]:
            cells = [name, *(row[name] for row in self._rows)]
            words = [word for c in cells for word in ([str(c)] if isinstance(c, Text) else c.split())]
            least[name] = max(map(len, words), default=0)
            wanted[name] = max(len(line) for cell in cells for line in (str(cell).splitlines() or [""]))
        return least, wanted


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _shared_out(spare: int, least: dict[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """Return widths that share out the spare room, to columns that lack least first."""
    widths = dict(least)
    for name in sorted(least, key=lambda name: wanted[name] - least[name]):
        more = min(spare, wanted[name] - least[name])
        widths[name], spare = widths[name] + more, spare - more
    return widths
