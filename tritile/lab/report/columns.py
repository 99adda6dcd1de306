"""Lay rows out as a table that fits a narrow terminal: words fold, and nothing is cut."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

Row = Mapping[str, str | Text]  # cells by the names of columns; a str folds where room is short


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
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = [name for name in rows[0] if name not in moved]
    for name in names:
        first = rows[0][name]
        justify, words = (first.justify, False) if isinstance(first, Text) else ("left", True)
        made.add_column(Text(name), justify=justify or "left", overflow="fold", no_wrap=not words)
    for place, row in enumerate(rows):
        cells = [each if isinstance(each := row[name], Text) else Text(each) for name in names]
        made.add_row(*cells, style=styles[place] if styles else None)
    return Group(heading, made) if heading else Group(made)
