"""Filling a folder with all that calls will ask of Triton's compiler, and proving that nothing is missing.

To find a kernel Triton forms a key of everything that decides what is compiled, and so the same code that
would compile, with a folder that only reads, tells what is there and what is not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.of_triton import forget_compiled
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError, TuningError, UnsupportedError, brief
from tritile.families.space import illegal
from tritile.runtime.ahead import compiles_for
from tritile.runtime.offline import compiling_for
from tritile.tune.deploy.folder import Missing, bytes_of, drop, key_of, reading, settle, slim, writing
from tritile.tune.deploy.modules import Module, build_into, modules_of
from tritile.tune.measure.pool import CompilePool

Entry = tuple[Tiled, Config]


def _named(entry: Entry) -> str:
    return f"{entry[0].label} with {entry[1]}"


@dataclass(frozen=True)
class Found:
    """What a folder holds of what some calls want.

    `kernels` are there, by Triton's keys; `missing` are not, each with an entry that wants it; `modules` are
    those of Triton itself that are missing. `refused` says by name what cannot be had, and why. `elsewhere`
    are places at which Triton would find kernels that, where the folder is, it does not.
    """

    kernels: set[str] = field(default_factory=set)
    missing: dict[str, Entry] = field(default_factory=dict)
    modules: list[Module] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    elsewhere: set[Path] = field(default_factory=set)

    @property
    def lines(self) -> list[str]:
        """A line for each thing that is missing or refused; none where all that is wanted is there."""
        missing = [(_named(entry), f"a kernel of {_named(entry)}") for entry in self.missing.values()]
        missing += [(module.name, str(module.path)) for module in self.modules]
        return [
            *(f"refused: {name}: {reason}" for name, reason in self.refused.items()),
            *(f"missing: {what}" for name, what in missing if name not in self.refused),
            *(f"the folder was made to be at {place}: see --at" for place in sorted(self.elsewhere)),
        ]


@dataclass(frozen=True)
class Filled:
    """What filling came to: what the folder holds now, how many kernels it gained, its bytes."""

    found: Found
    compiled: int
    bytes: int


def _checked(device: Device) -> None:
    if device.backend != "cuda":
        raise UnsupportedError(
            f"{device.name}: kernels can be compiled into a folder for NVIDIA GPUs only: for AMD's, Triton "
            "compiles otherwise for tensors of less than 2 GiB, of which problems do not tell"
        )


def _look(entries: Iterable[Entry], device: Device, found: Found) -> Iterator[Any]:
    """Yield the kernels that are there, and note what is not."""
    for entry in entries:
        problem, config = entry
        try:
            reason = illegal(config, problem, device)
            compiles = list(compiles_for(problem, config, device)) if reason is None else []
        except Exception as error:  # what a config cannot do it says in any way
            reason, compiles = brief(error), []
        if reason is not None:
            found.refused[_named(entry)] = reason
        for compiled in compiles:
            try:
                yield compiled()
            except Missing as missing:
                found.missing.setdefault(missing.key, entry)
                found.elsewhere.update({missing.told} if missing.told else ())
            except Exception as error:
                found.refused[_named(entry)] = brief(error)


def check(entries: Sequence[Entry], device: Device, folder: Path, place: Path | None = None) -> Found:
    """What a folder, at `place` when it is used (default: where it is), holds of what these entries want.

    Nothing is compiled, and nothing written. Raises UnsupportedError for a GPU that is not NVIDIA's,
    InvalidValueError where there is no folder, TuningError where TRITON_INTERPRET is set.
    """
    _checked(device)
    if not folder.is_dir():
        raise InvalidValueError(f"{folder} is no folder")
    folder = folder.absolute()
    found, functions, wanted = Found(), set(), set(modules_of(None))
    index = object()  # what this process compiled before is not taken for what the folder holds
    with reading(folder, place or folder), compiling_for(device, index):
        for kernel in _look(dict.fromkeys(entries), device, found):
            found.kernels.add(key_of(kernel))
            functions.add(kernel.src.fn)
            wanted.update(modules_of(kernel))
    for function in functions:
        forget_compiled(function, index)
    found.modules.extend(sorted(m for m in wanted if not (folder / m.path).is_file()))
    return found


def _compile(entry: Entry, device: Device, folder: Path) -> str | None:
    """Compile all that an entry wants into a folder; the reason where that is refused."""
    problem, config = entry
    try:
        with writing(folder), compiling_for(device):
            for compiled in compiles_for(problem, config, device):
                compiled()
    except Exception as error:  # a compiler may raise anything, and all of it means "refused"
        return brief(error)
    return None


def _compile_all(
    entries: Sequence[Entry], device: Device, folder: Path, jobs: int | None, done: Callable[[str], None]
) -> dict[str, str]:
    """Compile in parallel processes; what was refused, by name, and why."""
    refused: dict[str, str] = {}
    with CompilePool(jobs) as pool:
        futures = {pool.submit(_compile, entry, device, folder): entry for entry in entries}
        for future in as_completed(futures):
            entry = futures[future]
            try:
                reason = future.result()
            except TuningError as error:  # its compiler died, or hung
                reason = str(error)
            if reason is not None:
                refused[_named(entry)] = reason
            done(entry[0].label)
    return refused


def fill(
    entries: Sequence[Entry],
    device: Device,
    folder: Path,
    place: Path | None = None,
    jobs: int | None = None,
    whole: bool = False,
    begun: Callable[[int], None] = lambda total: None,
    done: Callable[[str], None] = lambda label: None,
) -> Filled:
    """Compile what a folder lacks of what calls of these entries want, for a GPU that need not be here.

    Args:
        entries: a problem and the config with which it will be called, each.
        device: the GPU.
        folder: created where there is none; what it holds already stays, and is not compiled again.
        place: where the folder will be when it is used: an absolute path. Default: where it is.
        jobs: processes that compile; by default one a core, 16 at most.
        whole: keep every stage of a compile, five times the bytes, and not only what a launch reads.
        begun: told how many entries are to be compiled.
        done: told the label of each as it is done.

    Raises as `check` does, and OSError where the folder cannot be written.
    """
    _checked(device)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    settle(folder, place or folder)
    before = check(entries, device, folder, place)
    lacking = list(dict.fromkeys(before.missing.values()))
    begun(len(lacking))
    refused: dict[str, str] = {}
    if lacking:
        drop(folder, before.missing)
        refused = _compile_all(lacking, device, folder, jobs, done)
        settle(folder, place or folder)
    after = check(entries, device, folder, place) if lacking else before
    if after.modules:
        refused |= build_into(folder, after.modules)
    gained = after.kernels - before.kernels
    if not whole:
        slim(folder, after.kernels)
    found = check(entries, device, folder, place)
    found.refused.update(refused)
    return Filled(found, len(gained), bytes_of(folder))
