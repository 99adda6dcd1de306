"""Print values as aligned lines, and in notebooks as tables in HTML, where all contents are escaped."""

from collections.abc import Iterable, Sequence
from html import escape


class Tabular:
    """A value that prints as a title and rows of cells, with headings and a last line if it has any."""

    _head: tuple[str, ...] = ()
    _last: str = ""

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
        last = (self._last,) if self._last else ()
        return "\n".join((self._title, *(f"  {text.rstrip()}" for text in texts), *last))

    def _repr_html_(self) -> str:
        def line(cells: Iterable[object], tag: str, of: str = "") -> str:
            return "<tr>" + "".join(f"<{tag}{of}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

        names = line(self._head, "th", ' scope="col"')
        head = f"<thead>{names}</thead>" if any(self._head) else ""
        body = "".join(line(row, "td") for row in self._rows)
        last = line((self._last,), "td", f' colspan="{max(1, len(self._head))}"') if self._last else ""
        foot = f"<tfoot>{last}</tfoot>" if last else ""
        return f"<table><caption>{escape(self._title)}</caption>{head}<tbody>{body}</tbody>{foot}</table>"
