"""Print values as aligned lines, and in notebooks as tables in HTML, where all contents are escaped."""

from collections.abc import Iterable, Sequence
from html import escape


def table_html(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a caption and a line of headings, each left out where it is empty."""

    def line(cells: Iterable[object], tag: str, of: str = "") -> str:
        return "<tr>" + "".join(f"<{tag}{of}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    caption = f"<caption>{escape(title)}</caption>" if title else ""
    names = line(head, "th", ' scope="col"')
    heading = f"<thead>{names}</thead>" if any(head) else ""
    return f"<table>{caption}{heading}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


class Tabular:
    """A value that prints as a title and rows of cells, below headings if it has any."""

    _head: tuple[str, ...] = ()

    @property
    def _title(self) -> str:
        raise NotImplementedError

    @property
    def _rows(self) -> Sequence[tuple[str, ...]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = [self._head, *self._rows] if self._head and self._rows else list(self._rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
        return "\n".join((self._title, *(f"  {text.rstrip()}" for text in texts)))

    def _repr_html_(self) -> str:
        return table_html(self._title, self._head, self._rows)
