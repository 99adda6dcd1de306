"""Compile calls of problems by configs, and prepare them to run."""

from collections.abc import Callable, Iterator
from typing import Any

from tritile.core import device as devices
from tritile.core.call import Call, call_for
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError, brief, is_bug
from tritile.families.work import pieces_of, work_of
from tritile.runtime import launch
from tritile.runtime.ahead import compiling_for
from tritile.runtime.compiles import log_compiles_as
from tritile.runtime.launch import Launch, SplitLaunch


def prepare(call: Call, config: Config) -> Launch | SplitLaunch:
    """Compile a call for the GPU that its tensors are on, and load.

    Raises TuningError if the config does not compile, or asks for more than the GPU has, and
    NotCompiledError if compiles are refused. A programming error passes.
    """
    index, pieces = call.tensors[0].device.index, []
    for piece, work in pieces_of(call, config, devices.gpu(index)):
        fault = f"{config} cannot run {piece.problem.label}"
        launched = launch.bound(work, launch.pointers_to(piece.buffers), index, fault)
        starts = zip(piece.memory, call.memory, strict=True)
        pieces.append((launched, tuple(at.address - start.address for at, start in starts)))
    return pieces[0][0] if len(pieces) == 1 else SplitLaunch(tuple(pieces))


def run_interpreted(call: Call, config: Config) -> None:
    """Run a call in Triton's interpreter, one at a time: in a process with TRITON_INTERPRET=1."""
    # Of few SMs, so that a program makes several tiles.
    launch.interpret(work_of(call, config, 3, False), call.memory)


def compiles_of(call: Call, config: Config, device: Device) -> Iterator[Callable[[], Any]]:
    """Return, for each kernel that `prepare` needs for `call` with `config`, a function that compiles it.

    They compile for the current target and return Triton's kernel; nothing runs. If a call takes several
    kernels, the last is the one that computes.
    """
    for piece, work in pieces_of(call, config, device):
        yield from launch.compiles_of(work, piece.buffers)


def compiles_for(problem: Tiled, config: Config, device: Device) -> Iterator[Callable[[], Any]]:
    """Yield a function that compiles it for each kernel that a call of `problem` launches with `config`.

    To be called inside `compiling_for(device)`. Each function returns Triton's kernel. Any error, here or in
    a compile, means that the config cannot be used.
    """
    for compiles in compiles_of(call_for(problem), config, device):
        yield log_compiles_as(problem.label, str(config))(compiles)


def compiled_for(problem: Tiled, config: Config, device: Device) -> Any:
    """Return Triton's compiled kernel of `config` for `problem` on `device`, which need not be present.

    If a call launches several kernels, return the one that computes. Not for use while another thread
    launches kernels: Triton's driver is a global. Raises TuningError, with the first line of the reason,
    if the compiler refuses. A programming error passes.
    """
    with compiling_for(device):
        try:
            return [compiled() for compiled in compiles_for(problem, config, device)][-1]
        except Exception as error:  # compilers raise many kinds, which mean "refused"
            if is_bug(error):
                raise
            raise TuningError(f"{config} does not compile for {device.name}: {brief(error)}") from error
