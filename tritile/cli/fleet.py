"""tritile pull, compact and show --shared: the folder in which hosts share trials."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tritile.cli import shared
from tritile.cli.remembered import sorted_out
from tritile.cli.shared import app, console, counted, device_of, number, print_json, print_table
from tritile.core.settings import shared_url
from tritile.errors import FileError, InvalidValueError, TritileError, brief

if TYPE_CHECKING:
    from tritile.tuner.store.folder import Folder


def _url(url: str | None = None) -> str:
    found = url or shared_url()
    if found is None:
        raise InvalidValueError(
            "no folder is shared: set TRITILE_SHARED to a path or a URL that all hosts see"
        )
    return found


@contextlib.contextmanager
def _opened(url: str) -> "Iterator[Folder]":
    from tritile.tuner.store.folder import Folder

    try:
        yield Folder(url)
    except (BrokenPipeError, TritileError):
        raise
    except Exception as error:  # a file system's own, of any kind
        raise FileError(f"{url}: {brief(error)}") from error


@app.command(epilog=shared.examples("tritile pull", "tritile pull --target h200"))
def pull(target: shared.Target = None) -> None:
    """Take in the trials of the shared folder, and write there what it lacks of this host's.

    Processes do so by themselves, for trials that they measure and miss. This command reads the whole folder.
    """
    from tritile.tuner.store.shared import SharedStore
    from tritile.tuner.store.trials import store_of

    url, device = _url(), device_of(target)
    store = store_of(device)
    assert isinstance(store, SharedStore)
    with shared.working(url):
        taken, written = store.exchange()
    console.print(f"{device.name}: {counted(taken, 'trial')} taken from {url}, {written} written there")
    if others := sorted_out(device)[1]:
        console.print(others)


@app.command(epilog=shared.examples("tritile compact /nfs/tritile", "tritile compact s3://bucket/tritile"))
def compact(
    url: Annotated[str | None, typer.Argument(help="The folder; default: `TRITILE_SHARED`.")] = None,
) -> None:
    """Join the objects of a shared folder into fewer, each with the newest trial of every config.

    Processes may go on reading and writing meanwhile.
    """
    with _opened(_url(url)) as folder:
        for gpu in folder.gpus():
            with shared.working(gpu):
                before, after, dropped = folder.compact(gpu)
            if not before:  # some other folder
                continue
            lines = f", {counted(dropped, 'invalid line')} dropped" if dropped else ""
            console.print(f"{gpu}: {counted(before, 'object')} before, {after} now{lines}")


def show_folder(gpu: str | None, as_json: bool) -> None:
    """Print what the shared folder has of each GPU model, or of the one with this slug."""
    from tritile.tuner.store.trials import moment

    url, rows = _url(), list[dict[str, Any]]()
    with _opened(url) as folder:
        for each in [gpu] if gpu else folder.gpus():
            objects, places, hosts, newest, skipped = folder.objects(each), set[int](), set[str](), "", 0
            for content in folder.read(objects):
                places.update(line.place for line in content.lines)
                hosts.update(line.provenance.get("host", "") for line in content.lines)
                newest = max([newest, *(line.row[-2] for line in content.lines)], key=moment)
                skipped += len(content.reasons)
            if not objects:  # some other folder
                continue
            facts = {"gpu": each, "objects": len(objects), "trials": len(places), "hosts": sorted(hosts)}
            rows.append(facts | {"newest_utc": newest, "skipped": skipped})
    if as_json:
        return print_json({"folder": url, "gpus": rows})
    cells = [
        {"gpu": row["gpu"], "newest": row["newest_utc"][:16], "hosts": number(len(row["hosts"]))}
        | {name: number(row[name]) for name in ("objects", "trials", "skipped")}
        for row in rows
    ]
    if cells:
        print_table(cells, url)
    else:
        console.print(f"{url} holds nothing")
