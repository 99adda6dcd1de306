"""Print values as lines, and as tables in HTML for notebooks; all contents are escaped."""

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


class Told:
    """Print a value as a title and a line for each name: as text, and in notebooks as a table."""

    @property
    def _title(self) -> str:
        raise NotImplementedError

    @property
    def _told(self) -> tuple[tuple[str, str], ...]:
        raise NotImplementedError

    def __repr__(self) -> str:
        told = self._told
        width = max(len(name) for name, _ in told)
        return "\n".join((self._title, *(f"  {name:{width}}  {text}" for name, text in told)))

    def _repr_html_(self) -> str:
        return table_html(self._title, ("", ""), self._told)
