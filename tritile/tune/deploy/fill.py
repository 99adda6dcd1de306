"""Fill a folder with all that calls will ask of Triton's compiler, and prove that nothing is missing.

To find a kernel, Triton makes a key of everything that decides what is compiled. So the code that would
compile, run on a folder that can only be read, tells which kernels are there and which are missing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.of_triton import forget_compiled
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError, UnsupportedError, brief
from tritile.families.space import illegal
from tritile.runtime.ahead import compiles_for
from tritile.runtime.offline import compiling_for
from tritile.tune.deploy.folder import Missing, bytes_of, drop, key_of, reading, settle, slim, writing
from tritile.tune.deploy.modules import Module, build_into, modules_of
from tritile.tune.measure.pool import done_in_parallel

Entry = tuple[Tiled, Config]


def _named(entry: Entry) -> str:
    return f"{entry[0].label} with {entry[1]}"


@dataclass(frozen=True)
class Found:
    """Tell which of the kernels that some calls need a folder holds.

    `kernels` are there, by Triton's keys; `missing` are not, each with an entry that needs it; `modules` are
    missing modules of Triton itself. `refused` names what cannot be compiled, and why. `elsewhere` are other
    places of the folder, at which Triton would find kernels that it does not find here.
    """

    kernels: set[str] = field(default_factory=set)
    missing: dict[str, Entry] = field(default_factory=dict)
    modules: list[Module] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    elsewhere: set[Path] = field(default_factory=set)

    @property
    def lines(self) -> list[str]:
        """Return a line for each kernel or module that is missing or refused."""
        missing = [(_named(entry), f"a kernel of {_named(entry)}") for entry in self.missing.values()]
        missing += [(module.name, str(module.path)) for module in self.modules]
        return [
            *(f"refused: {name}: {reason}" for name, reason in self.refused.items()),
            *(f"missing: {what}" for name, what in missing if name not in self.refused),
            *(f"the folder was made to be at {place}: see --at" for place in sorted(self.elsewhere)),
        ]


@dataclass(frozen=True)
class Filled:
    """Hold the outcome of filling: what the folder holds now, how many kernels it gained, its bytes."""

    found: Found
    compiled: int
    bytes: int


def check_nvidia(device: Device) -> None:
    """Raise UnsupportedError for a GPU that kernels are not compiled ahead for."""
    if device.backend != "cuda":
        raise UnsupportedError(
            f"{device.name}: kernels can be compiled into a folder for NVIDIA GPUs only. For AMD GPUs Triton "
            "compiles other code for tensors below 2 GiB, and a problem does not hold that size"
        )


def _look(entries: Iterable[Entry], device: Device, found: Found) -> Iterator[Any]:
    """Yield the kernels that are there, and note the others in `found`."""
    for entry in entries:
        problem, config = entry
        try:
            reason = illegal(config, problem, device)
            compiles = list(compiles_for(problem, config, device)) if reason is None else []
        except Exception as error:  # a config that does not fit may raise anything
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
    """Tell which kernels of these entries a folder holds; it is used at `place` (default: where it is).

    Nothing is compiled or written. Raises UnsupportedError for a GPU that is not NVIDIA's, InvalidValueError
    where there is no folder, TuningError where TRITON_INTERPRET is set.
    """
    check_nvidia(device)
    if not folder.is_dir():
        raise InvalidValueError(f"{folder} is not a folder")
    folder = folder.absolute()
    found, functions, wanted = Found(), set(), set(modules_of(None))
    index = object()  # kernels that this process compiled before do not count
    with reading(folder, place or folder), compiling_for(device, index):
        for kernel in _look(dict.fromkeys(entries), device, found):
            found.kernels.add(key_of(kernel))
            functions.add(kernel.src.fn)
            wanted.update(modules_of(kernel))
    for function in functions:
        forget_compiled(function, index)
    found.modules.extend(sorted(m for m in wanted if not (folder / m.path).is_file()))
    return found


def _compile(entry: Entry, device: Device, folder: Path) -> None:
    """Compile all that an entry needs into a folder. Raises whatever the compiler raises."""
    problem, config = entry
    with writing(folder), compiling_for(device):
        for compiled in compiles_for(problem, config, device):
            compiled()


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
    """Compile the kernels that calls of these entries need and a folder lacks; the GPU need not be here.

    Args:
        entries: problems, each with the config by which it will be called.
        device: the GPU.
        folder: created where there is none; kernels that it holds stay, and are not compiled again.
        place: where the folder will be when it is used: an absolute path. Default: where it is.
        jobs: processes that compile. Default: one a core, 16 at most.
        whole: keep every stage of a compile, five times the bytes, and not only what a launch reads.
        begun: called with the number of entries to compile.
        done: called with the label of each entry as it is done.

    Raises as `check` does, and OSError where the folder cannot be written.
    """
    check_nvidia(device)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    settle(folder, place or folder)
    before = check(entries, device, folder, place)
    lacking = list(dict.fromkeys(before.missing.values()))
    begun(len(lacking))
    refused: dict[str, str] = {}
    if lacking:
        drop(folder, before.missing)
        wanted = {entry: (entry, device, folder) for entry in lacking}
        reasons = done_in_parallel(_compile, wanted, jobs, lambda entry: done(entry[0].label))
        refused = {_named(entry): reason for entry, reason in reasons.items()}
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
