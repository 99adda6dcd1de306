"""Write tables as HTML for notebooks; all contents are escaped."""

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
