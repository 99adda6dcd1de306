"""Read what can still be read of a store whose file is damaged."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tritile.errors import InvalidValueError
from tritile.planning.database import FAULTS, bounded, connect, create
from tritile.planning.trial import (
    ENVIRONMENT_COLUMNS,
    TRIAL_COLUMNS,
    Row,
    Trial,
    environment_from,
    trial_from,
)

_MOST_BYTES: Final = 1 << 30


def _mended(data: bytes) -> bytes:
    """Return the pages of a store behind the first page of a fresh one.

    The first page holds the schema, and where each table begins: it is the same in every store.
    """
    with contextlib.closing(connect(":memory:")) as fresh:
        create(fresh)
        whole = fresh.serialize()
    size = int.from_bytes(whole[16:18], "big")
    pages = len(data) // size
    return whole[:28] + pages.to_bytes(4, "big") + whole[32:size] + data[size : pages * size]


def _readable(connection: sqlite3.Connection, query: str, orders: Sequence[str]) -> dict[int, Row]:
    """Return the rows of a query by their first column, read in each order as far as pages can be read."""
    found: dict[int, Row] = {}
    for order in orders:
        with contextlib.suppress(*FAULTS), contextlib.closing(connection.execute(query + order)) as rows:
            for row in rows:
                if row[0] in found:  # read from the other end; or pages refer to each other in a circle
                    break
                found[row[0]] = row[1:]
    return found


def salvaged(path: Path) -> list[tuple[Row, Trial]]:
    """Return environment and trial of each valid row that can be read; [] where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return []
        pages = _mended(path.read_bytes())
        with contextlib.closing(connect(":memory:")) as connection:
            connection.deserialize(pages)
            return list(_valid_pairs(connection))
    except (*FAULTS, AttributeError, MemoryError):  # AttributeError: a Python without `deserialize`
        return []


def _valid_pairs(connection: sqlite3.Connection) -> Iterator[tuple[Row, Trial]]:
    """Yield the pairs of `salvaged`, one for each environment where table and index differ in it."""
    ends = (" ORDER BY id", " ORDER BY id DESC")
    columns, index = bounded(ENVIRONMENT_COLUMNS), " INDEXED BY sqlite_autoindex_environments_1"
    environments = [
        _readable(connection, f"SELECT id, {columns} FROM environments NOT INDEXED", ends),
        _readable(connection, f"SELECT id, {columns} FROM environments{index}", ("",)),
    ]
    trials = f"SELECT id, environment, {bounded(TRIAL_COLUMNS)} FROM trials NOT INDEXED"
    for number, *row in _readable(connection, trials, ends).values():
        for facts in dict.fromkeys(told[number] for told in environments if number in told):
            with contextlib.suppress(InvalidValueError):
                yield environment_from(facts), trial_from(row)
