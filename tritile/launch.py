"""Call + config -> running kernel.

`arguments` is the one place that knows what each kernel takes. `prepare` compiles and returns a
`Launch`, which runs the compiled kernel with nothing left to decide: calling it costs a stream
look-up and the driver's launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

import torch
import triton
from triton.runtime.driver import driver

from tritile.autotuner import Autotuner, autotune
from tritile.config import Config
from tritile.errors import TuningError, brief
from tritile.interpreter import interpret, library_lock
from tritile.kernels.matmul import matmul_tile
from tritile.kernels.transpose import transpose_tile
from tritile.space import ALL_CONFIGS, TILE
from tritile.views import Call, MatmulCall, TransposeCall, View

_MAX_GRID_AXIS: Final = 65535
_MAX_PROGRAMS: Final = 2**31 - 1  # of one launch: Triton's launcher counts them in 32 bits, and drops more
_WIDE: Final = 2**31 - 2**16  # from here on an index, a block past the end included, may need 64 bits


def _overhangs(size: str, block: str) -> Any:
    return lambda values: values[size] % values[block] != 0


def _tuned(op: str, kernel: Any, key: list[str], heuristics: dict[str, Any]) -> Autotuner:
    configs = [config.to_triton() for config in ALL_CONFIGS[op]]
    tuner = autotune(configs, key)(triton.heuristics(heuristics)(kernel))
    tuner.family = TILE
    return tuner


# Kernels by operation and family, tuned over the blocks, GROUP_M, num_warps and num_stages of the space.
KERNELS: Final[dict[str, dict[str, Autotuner]]] = {
    "matmul": {
        TILE: _tuned(
            "matmul",
            matmul_tile,
            ["M", "N", "K", "batch", "ALIGN_A", "ALIGN_B", "ALIGN_OUT", "PRECISION"],
            {
                "MASK_M": _overhangs("M", "BLOCK_M"),
                "MASK_N": _overhangs("N", "BLOCK_N"),
                "MASK_K": _overhangs("K", "BLOCK_K"),
            },
        )
    },
    "transpose": {
        TILE: _tuned(
            "transpose",
            transpose_tile,
            ["M", "N", "batch", "ALIGN_X", "ALIGN_OUT", "LANES"],
            {"MASK_M": _overhangs("M", "BLOCK_M"), "MASK_N": _overhangs("N", "BLOCK_N")},
        )
    },
}


class Arguments(NamedTuple):
    """A kernel, the grid to run it on, its arguments in order, and how to compile it."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    options: dict[str, Any]


def _unit(extent: int, itemsize: int) -> int:
    """The largest power of two that divides `extent`, up to 16 bytes of elements."""
    return min(extent & -extent, max(1, 16 // itemsize)) or 1


def _units(view: View, lanes: int = 1) -> tuple[int, int, int]:
    """The same of a view's row, column and batch strides, counted in words of `lanes` to an element."""
    word = view.itemsize // lanes
    batch = min((_unit(lanes * s, word) for s in view.batch_strides if s), default=16 // word)
    return _unit(lanes * view.strides[0], word), _unit(lanes * view.strides[1], word), batch


def _batch(batch_shape: tuple[int, ...], *views: View) -> tuple[tuple[int, ...], ...]:
    """The batch's shape and each operand's strides: never empty, which kernels could not index."""
    if not batch_shape:
        return ((1,), *(((0,),) * len(views)))
    return (batch_shape, *(view.batch_strides for view in views))


def _matmul_args(call: MatmulCall) -> dict[str, Any]:
    """What `matmul_tile` takes that no config decides, by name."""
    a, b, out = call.a, call.b, call.out
    (m, k), n = a.shape, b.shape[1]
    batch_shape, a_batch, b_batch, out_batch = _batch(call.batch_shape, a, b, out)
    exact = call.dtype == "float32" and call.precision == "ieee"
    return {
        "a_ptr": a.tensor, "b_ptr": b.tensor, "out_ptr": out.tensor,
        "M": m, "N": n, "K": k,
        "stride_am": a.strides[0], "stride_ak": a.strides[1],
        "stride_bk": b.strides[0], "stride_bn": b.strides[1],
        "stride_om": out.strides[0], "stride_on": out.strides[1],
        "batch": prod(batch_shape), "batch_shape": batch_shape,
        "a_batch_strides": a_batch, "b_batch_strides": b_batch, "out_batch_strides": out_batch,
        "ALIGN_M": _unit(m, a.itemsize), "ALIGN_N": _unit(n, a.itemsize), "ALIGN_K": _unit(k, a.itemsize),
        "ALIGN_A": _units(a), "ALIGN_B": _units(b), "ALIGN_OUT": _units(out),
        "WIDE": max(a.span, b.span, out.span, m, n, k, prod(batch_shape)) >= _WIDE,
        "PRECISION": call.precision, "COMPENSATED": exact,
    }  # fmt: skip


def _transpose_args(call: TransposeCall) -> dict[str, Any]:
    """What `transpose_tile` takes that no config decides, by name."""
    x, out = call.x, call.out
    m, n = x.shape
    lanes = 2 if x.itemsize == 16 else 1
    word = x.itemsize // lanes
    batch_shape, x_batch, out_batch = _batch(call.batch_shape, x, out)
    return {
        "x_ptr": x.tensor, "out_ptr": out.tensor,
        "M": m, "N": n,
        "stride_xm": lanes * x.strides[0], "stride_xn": lanes * x.strides[1],
        "stride_om": lanes * out.strides[0], "stride_on": lanes * out.strides[1],
        "batch": prod(batch_shape), "batch_shape": batch_shape,
        "x_batch_strides": tuple(lanes * stride for stride in x_batch),
        "out_batch_strides": tuple(lanes * stride for stride in out_batch),
        "ALIGN_M": _unit(m, word), "ALIGN_N": _unit(n, word),
        "ALIGN_X": _units(x, lanes), "ALIGN_OUT": _units(out, lanes),
        "WIDE": max(lanes * x.span, lanes * out.span, m, n, prod(batch_shape)) >= _WIDE,
        "LANES": lanes, "FLIP_FIRST": call.flip[0], "FLIP_LAST": call.flip[1],
    }  # fmt: skip


def call_args(call: Call) -> dict[str, Any]:
    """The arguments of a call's kernel that no config decides, by name."""
    return _matmul_args(call) if isinstance(call, MatmulCall) else _transpose_args(call)


def grid(values: Mapping[str, Any]) -> tuple[int, int, int]:
    """The grid of a tile kernel: tiles of a matrix, then matrices, over two axes as one is too short."""
    tiles = -(-values["M"] // values["BLOCK_M"]) * -(-values["N"] // values["BLOCK_N"])
    across = min(values["batch"], _MAX_GRID_AXIS)
    return tiles, across, -(-values["batch"] // across)


def arguments(call: Call, config: Config) -> Arguments:
    """What launches `call` with `config`."""
    tuned = KERNELS[call.problem.op][config.family]
    values = call_args(call) | dict(config.kwargs)
    for name, heuristic in tuned.fn.values.items():
        values[name] = heuristic(values)
    options = {name: v for name, v in config.to_triton().all_kwargs().items() if name not in values}
    args = tuple(values[name] for name in tuned.arg_names)
    return Arguments(tuned.fn.fn.fn, grid(values), args, options)


@dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel with its grid and every argument but its pointers."""

    kernel: Any
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]
    device: int

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run on the current stream of the GPU that the kernel was compiled for."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(*tensors)
        kernel = self.kernel
        stream = driver.active.get_current_stream(self.device)
        metadata = kernel.launch_metadata(self.grid, stream, *tensors, *self.rest)
        hooks = triton.knobs.runtime
        kernel.run(
            *self.grid,
            stream,
            kernel.function,
            kernel.packed_metadata,
            metadata,
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *tensors,
            *self.rest,
        )
        return None


@dataclass(frozen=True, slots=True)
class SplitLaunch:
    """Launches that share the batch of one call, each with the offset of its operands, in elements."""

    pieces: tuple[tuple[Launch, tuple[int, ...]], ...]

    @property
    def kernel(self) -> Any:
        """The compiled kernel of the first piece."""
        return self.pieces[0][0].kernel

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run one after the other on the current stream."""
        for launch, offsets in self.pieces:
            launch(*(_shifted(tensor, by) for tensor, by in zip(tensors, offsets, strict=True)))


def _shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + elements)


def _piece(call: Call, axis: int, start: int, size: int) -> Call:
    """The part of a call from `start` on along one axis of its batch."""

    def part(view: View) -> View:
        step = view.batch_strides[axis] * view.itemsize // view.tensor.element_size()
        return replace(view, tensor=_shifted(view.tensor, start * step))

    shape = (*call.batch_shape[:axis], size, *call.batch_shape[axis + 1 :])
    if isinstance(call, MatmulCall):
        return replace(call, a=part(call.a), b=part(call.b), out=part(call.out), batch_shape=shape)
    return replace(call, x=part(call.x), out=part(call.out), batch_shape=shape)


def _pieces(call: Call, config: Config) -> list[Call]:
    """The call, in as many parts of its batch as keep each within what one launch can count."""
    if prod(arguments(call, config).grid) <= _MAX_PROGRAMS:
        return [call]
    axis = max(range(len(call.batch_shape)), key=call.batch_shape.__getitem__)
    size = call.batch_shape[axis]
    halves = _piece(call, axis, 0, size // 2), _piece(call, axis, size // 2, size - size // 2)
    return [piece for half in halves for piece in _pieces(half, config)]


def compile_only(call: Call, config: Config) -> Any:
    """Triton's compiled kernel for `call` with `config`, for the current target; nothing is run."""
    kernel, shape, args, options = arguments(call, config)
    with library_lock:
        return kernel.warmup(*args, grid=shape, **options)


def prepare(call: Call, config: Config) -> Launch | SplitLaunch:
    """Compile for the GPU that the call's tensors are on, and load.

    Raises TuningError where the config does not compile, or asks for more than the GPU has.
    """
    pieces = _pieces(call, config)
    if len(pieces) == 1:
        return _prepared(call, config)
    starts = [tensor.data_ptr() for tensor in call.tensors]
    return SplitLaunch(
        tuple(
            (
                _prepared(piece, config),
                tuple(
                    (tensor.data_ptr() - start) // tensor.element_size()
                    for tensor, start in zip(piece.tensors, starts, strict=True)
                ),
            )
            for piece in pieces
        )
    )


def _prepared(call: Call, config: Config) -> Launch:
    device = call.tensors[0].device.index
    with torch.cuda.device(device):
        kernel, shape, args, options = arguments(call, config)
        try:
            with library_lock:
                compiled = kernel.warmup(*args, grid=shape, **options)
            compiled._init_handles()  # load now, so that what the GPU cannot take fails here
        except Exception as error:  # compilers and drivers raise anything; all of it means "not this one"
            raise TuningError(f"{config} cannot run {call.problem.label}: {brief(error)}") from error
    return Launch(compiled, shape, args[len(call.tensors) :], device)


def measure(call: Call, configs: Sequence[Config]) -> Config:
    """Time the configs on the call's own tensors, in their order, remember, and return the fastest.

    The output is overwritten by each. Raises TuningError where no config works.
    """
    tuned, timed = KERNELS[call.problem.op][configs[0].family], _pieces(call, configs[0])[0]
    with torch.cuda.device(call.tensors[0].device):
        options = [config.to_triton() for config in configs]
        best = tuned.measure(call.problem, (), {**call_args(timed), "grid": grid, "warmup": False}, options)
    return replace(Config.from_triton(best), family=tuned.family)


def run_interpreted(call: Call, config: Config) -> None:
    """Run on tensors in host memory, in Triton's interpreter."""
    kernel, shape, args, _ = arguments(call, config)
    interpret(kernel, shape, args, {})
