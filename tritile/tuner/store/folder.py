"""Objects of a fleet's folder: `<url>/<gpu>/<UTC>-<token>.jsonl`, a line of JSON for each trial.

Every flush writes a new object. None is locked, appended to or rewritten, so any file system or object store
will do. `compact` joins objects: it writes the joined ones first, so readers see a trial once or twice, which
is the same.

Lines are data, by whoever can write there, and pass the same checks as rows of a store.

The newest trial of a config counts, and hosts' clocks differ. So the date of a trial is corrected by the
difference between its writer's clock, which the line names, and that of the file system, which dates the
object; it is never later than the object. All readers find the same date, whatever their own clocks say.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from tritile.core.device import Device
from tritile.core.distribution import __version__
from tritile.errors import InvalidValueError, brief
from tritile.tuner.store.files import write_whole
from tritile.tuner.store.trials import ENVIRONMENT, TRIAL, Row, moment, pair_from, row_of

FORMAT: Final = 1
MAX_OBJECT: Final = 4 << 20  # bytes; larger objects are not read
_MAX_LINE: Final = 1 << 20
_MAX_OBJECTS: Final = 20_000  # of a GPU model
_TOLERANCE_S: Final = 60.0  # by which clocks may differ
_FUTURE_S: Final = 2 * 86400.0  # by which this host's clock may be behind the folder's
_MAX_JOINED: Final = 256 << 20  # bytes that one compaction reads, as it keeps them in memory
_NAME: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{16}\.jsonl")
_CHANGED: Final = ("mtime", "LastModified", "updated", "last_modified", "created")  # as file systems have it
_REAL: Final = [len(ENVIRONMENT) + [*TRIAL].index(name) for name in ("us", "spread", "error")]
_PROVENANCE: Final = ("host", "driver", "clock_ghz", "torch", "tritile")  # for people, part of no key


@functools.cache
def provenance(device: Device) -> dict[str, Any]:
    """Return what lines say of this host, for people: none of it is part of a key."""
    driver = ""
    for name in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            driver = driver or (re.findall(r"\d+\.\d[\d.]+", Path(name).read_text()) or [""])[0]
    facts = platform.node(), driver, device.clock_ghz, torch.__version__, __version__
    return dict(zip(_PROVENANCE, facts, strict=True))


def now() -> datetime:
    return datetime.now(UTC)


class Line(NamedTuple):
    """A trial. `row` ends in the date that the trial had before it was corrected, or None."""

    environment: Row
    row: Row
    provenance: dict[str, Any]

    @property
    def place(self) -> int:
        """A hash of what identifies the trial."""
        return hash((self.environment, self.row[0], self.row[2]))

    @property
    def order(self) -> tuple[float, bool, float]:
        """Of two lines for one place the one with the larger order counts, as in a store.

        That is the newer one. A check may follow within the second.
        """
        *_, error, failure, date, _ = self.row
        return moment(date), error is not None or failure is not None, self.row[3] or 0.0

    @property
    def text(self) -> str:
        facts = dict(zip((*ENVIRONMENT, *TRIAL), (*self.environment, *self.row[:-1]), strict=True))
        facts = {"format": FORMAT} | facts | self.provenance
        return json.dumps({name: value for name, value in facts.items() if value is not None})


class _OtherFormatError(InvalidValueError):
    """A line that another version of tritile may know."""


def _line_from(raw: bytes, changed: float | None) -> Line:
    """Return the trial of a line in an object that was written at `changed`. Raises InvalidValueError."""
    try:
        if len(raw) > _MAX_LINE:
            raise ValueError("too long")
        data = json.loads(raw.decode())
        if b"\\u" in raw:
            json.dumps(data, ensure_ascii=False).encode()  # SQLite takes no lone surrogates
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _OtherFormatError(f"{raw[:40]!r}: its format is not {FORMAT}")
        values = [data.get(name) for name in (*ENVIRONMENT, *TRIAL)]
        for place in _REAL:  # a whole number may be too large for SQLite's integers
            values[place] = float(number) if type(number := values[place]) is int else number
        environment, trial = pair_from(values)
        row, before = tuple(values[len(ENVIRONMENT) :]) if trial.failure is None else row_of(trial), None
        measured = moment(trial.measured_utc)
        written = moment(data.get("written_utc", ""))
        skew = changed - written if changed is not None and math.isfinite(written) else 0.0
        moment_now = now().timestamp()
        latest = moment_now if changed is None else min(changed, moment_now + _FUTURE_S)
        corrected = measured + (skew if abs(skew) > _TOLERANCE_S else 0.0)
        corrected = latest if corrected > latest + _TOLERANCE_S else corrected
        if corrected != measured:
            before = trial.measured_utc
            row = (*row[:-1], datetime.fromtimestamp(corrected, UTC).isoformat(timespec="seconds"))
    except InvalidValueError:
        raise
    except (ValueError, RecursionError, OverflowError, OSError) as error:
        raise InvalidValueError(f"{raw[:40]!r} is not a trial: {str(error)[:80]}") from error
    origin = {name: str(data[name])[:200] for name in _PROVENANCE if name in data}
    return Line(environment, (*row, before), origin)


class Object(NamedTuple):
    """A file of lines: its size in bytes, and when it was written, in seconds since 1970, if known."""

    path: str
    size: int
    changed: float | None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def _object_from(info: dict[str, Any]) -> Object | None:
    """Return the object that a file system lists; None for anything else, such as a link or a pipe."""
    found = Object(info["name"], info.get("size") or 0, None)
    if info.get("type") != "file" or not found.size or not _NAME.fullmatch(found.name):
        return None
    when = next((info[name] for name in _CHANGED if info.get(name)), None)
    if isinstance(when, (int, float)):
        return found._replace(changed=float(when))
    with contextlib.suppress(InvalidValueError):
        return found._replace(changed=moment(str(when)))
    return found


class Content(NamedTuple):
    """The lines of an object, and the reasons for which others were skipped.

    `is_read`: False if it could not be read. `is_complete`: False if there may be more in it, for another
    version of tritile or once its writer is done.
    """

    object: Object
    lines: list[Line]
    reasons: list[str]
    is_read: bool
    is_complete: bool


class Folder:
    """The objects below a URL. Methods raise whatever the file system raises."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # the extra `shared` has what it needs for URLs
        from fsspec.implementations.local import LocalFileSystem

        self.fs, root = url_to_fs(url)
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.fs.invalidate_cache()  # of listings

    def gpus(self) -> list[str]:
        """Return the names of the folders of GPU models."""
        found = [each for each in self.fs.ls(self.root, detail=True) if each["type"] == "directory"]
        names = (each["name"].rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if re.fullmatch(r"[\w-]+", name))  # as `Device.slug`

    def objects(self, gpu: str) -> list[Object]:
        """Return a GPU model's objects, the oldest first; none without a folder."""
        try:
            if self.is_local:  # however many names there are
                with os.scandir(f"{self.root}/{gpu}") as entries:
                    listed = [self.fs.info(each) for each in itertools.islice(entries, 2 * _MAX_OBJECTS)]
            else:
                listed = self.fs.ls(f"{self.root}/{gpu}", detail=True)
        except FileNotFoundError:
            return []
        found = sorted(
            filter(None, map(_object_from, listed)), key=lambda each: (each.changed or 0.0, each.name)
        )
        return found[:_MAX_OBJECTS]

    def read(self, objects: Iterable[Object]) -> Iterator[Content]:
        """Read objects, one at a time. One that was deleted meanwhile is left out."""
        for each in objects:
            lines, reasons, raw = list[Line](), list[str](), b""
            try:
                if each.size > MAX_OBJECT:
                    raise InvalidValueError(f"more than {MAX_OBJECT >> 20} MiB")
                raw = self.fs.cat_file(each.path, 0, each.size)
            except FileNotFoundError:
                continue
            except Exception as error:  # only this object's, such as a file that others may not read
                reasons.append(f"{each.name}: {brief(error)}")
            is_read = not reasons
            is_old = each.changed is not None and time.time() - each.changed > 86400
            is_complete = bool(raw) and (raw.endswith(b"\n") or is_old)
            for number, line in enumerate(filter(None, raw.split(b"\n"))):
                if number % 10 == 0:
                    time.sleep(1e-4)  # leave the interpreter to other threads, which would wait 5 ms for it
                try:
                    lines.append(_line_from(line, each.changed))
                except InvalidValueError as error:
                    reasons.append(f"{each.name}: {error}"[:300])
                    is_complete = is_complete and not isinstance(error, _OtherFormatError)
            yield Content(each, lines, reasons, is_read, is_complete)

    def put(self, gpu: str, lines: Iterable[Line], **more: Any) -> list[Object]:
        """Write lines, with more facts, as new objects, and return these."""
        parts, paths = list[bytearray](), list[str]()
        for line in lines:
            text = line._replace(provenance=line.provenance | more).text.encode() + b"\n"
            if not parts or len(parts[-1]) + len(text) > MAX_OBJECT:
                parts.append(bytearray())
            parts[-1] += text
        for part in parts:
            path = f"{self.root}/{gpu}/{now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(8)}.jsonl"
            paths.append(path)
            if self.is_local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_whole(Path(path), bytes(part))
                continue
            try:
                self.fs.pipe_file(path, bytes(part))
            except FileNotFoundError:  # object stores have no folders, other file systems need them
                self.fs.makedirs(f"{self.root}/{gpu}", exist_ok=True)
                self.fs.pipe_file(path, bytes(part))
        self.fs.invalidate_cache()
        return [*filter(None, (_object_from(self.fs.info(path)) for path in paths))]

    def compact(self, gpu: str) -> tuple[int, int, int]:
        """Join a GPU model's objects; return how many there were and are, and how many lines were dropped.

        Objects of more than half the largest size stay as they are, and those that are not complete.
        """
        best: dict[int, Line] = {}
        listed, joined, dropped, total = self.objects(gpu), list[Object](), 0, 0
        for content in self.read(each for each in listed if each.size <= MAX_OBJECT // 2):
            if content.is_complete and total < _MAX_JOINED:
                total += content.object.size
                joined.append(content.object)
                dropped += len(content.reasons)
                for line in content.lines:
                    best[line.place] = max(best.get(line.place, line), line, key=lambda each: each.order)
        if self.is_local:  # what killed writers left
            for path in Path(self.root, gpu).glob(".*.tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > 86400:
                        path.unlink()
        if len(joined) < 2:
            return len(listed), len(listed), 0
        count = len(self.put(gpu, best.values()))
        for each in joined:
            with contextlib.suppress(FileNotFoundError):  # by another compaction
                self.fs.rm_file(each.path)
        return len(listed), len(listed) - len(joined) + count, dropped
