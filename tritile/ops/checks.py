"""Checks of arguments that every operation shares. Each raises before anything is launched."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from tritile.core.of_torch import FakeTensor, forward_level, is_transformed, storage_number
from tritile.errors import DeviceError, DtypeError, GradientError, OverlapError, ShapeError, UnsupportedError

_MAX_OVERLAP_WORK = 100_000  # steps of the exact overlap test before memory is called overlapping


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: Any) -> str:
    """A tensor in an error message: dtype, shape, device."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {str(tensor)[:60]!r}"
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}"


def check_tensor(op: str, name: str, tensor: Any) -> None:
    """A dense tensor in host or GPU memory, or one that stands for such, as one on the meta device does."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{op}: {name} is {describe(tensor)}: wanted a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise DtypeError(f"{op}: {name} is {kind}: wanted a dense (strided) tensor")
    if tensor.device.type not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"{op}: {name} is on {tensor.device}: wanted cuda, cpu or meta")


def check_rank(op: str, name: str, tensor: Any, rank: int) -> None:
    """As `check_tensor`, of so many dimensions."""
    check_tensor(op, name, tensor)
    if tensor.ndim != rank:
        raise ShapeError(f"{op}: {name} is {tuple(tensor.shape)}: wanted {rank} dimensions")


def check_memory(op: str, *tensors: Any) -> None:
    """Tensors that do not stand for others, where their memory is needed; what is no tensor passes."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (is_transformed(tensor) or isinstance(tensor, FakeTensor)):
            raise UnsupportedError(
                f"{op}: {describe(tensor)} has no memory of its own (traced, or inside vmap or jvp): "
                "wanted a plain tensor"
            )


def check_constant(op: str, name: str, tensor: torch.Tensor) -> None:
    """A tensor that needs no gradient and carries no tangent."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            f"{op}: {name} requires a gradient, and {op} offers none for it: "
            f"call it under torch.no_grad(), or with {name}.detach()"
        )
    if forward_level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise GradientError(f"{op}: {name} carries a tangent, and {op} offers no derivative for it")


def check_may_change(op: str, out: torch.Tensor) -> None:
    """An output that is not of inference mode, outside of it: torch refuses to change one, too."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise GradientError(
            f"{op}: out was made inside torch.inference_mode(), outside of which it may not change"
        )


def check_same_device(op: str, first: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """All tensors of a call on one device."""
    if first.device != other.device:
        raise DeviceError(f"{op}: {name} is on {other.device}: wanted {first.device}, as the first operand")


def reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((span + 1) * tensor.element_size())


def entangled(a: torch.Tensor, a_reach: int, b: torch.Tensor, b_reach: int) -> bool:
    """Whether tensors of one device, that reach so far, lie in one another's range: else they are apart."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + b_reach and b_start < a_start + a_reach


class _Memory:
    """A tensor's memory to numpy's exact overlap test, which computes with addresses and reads nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr() + (size if tensor.is_meta else 0), True),  # numpy refuses 0
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a byte. Interleaved but disjoint views (two columns of one) do not.

    Exact, by numpy.shares_memory, unless that takes over 100,000 steps: then taken to overlap.
    """
    if a.device != b.device or a.numel() == 0 or b.numel() == 0 or not entangled(a, reach(a), b, reach(b)):
        return False
    if _storage(a) != _storage(b):
        return False
    work: Any = _MAX_OVERLAP_WORK
    try:
        return bool(np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), work))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may be one element: a stride lies within the reach of smaller ones.

    Sufficient for every view that slicing, transposing and expanding make; some other sets of strides
    that never meet are taken to overlap too.
    """
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    steps = sorted((step, size) for step, size in pairs if size > 1)
    reach = 0
    for step, size in steps:
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def same_place(a: torch.Tensor, b: Any) -> bool:
    """Whether two tensors are the same elements in the same memory."""
    if b is a:
        return not (a.is_conj() or a.is_neg())
    try:
        plain = not (a.is_conj() or a.is_neg() or b.is_conj() or b.is_neg())
        return plain and (a.dtype, a.device) == (b.dtype, b.device) and _placed(a) == _placed(b)
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        return False


def _placed(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), _storage(tensor)


def _storage(tensor: torch.Tensor) -> Any:
    """Return what tells tensors of one address apart: on the meta device all storages start at 0."""
    return storage_number(tensor.untyped_storage()) if tensor.is_meta else None


def check_out(
    op: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor, **inputs: torch.Tensor
) -> None:
    """An output of just this shape and dtype, on the device of `like`, that shares no memory with inputs."""
    check_like(op, out, shape, dtype, like)
    check_room(op, out, **inputs)


def check_room(op: str, out: torch.Tensor, **inputs: torch.Tensor) -> None:
    """An output whose elements share no memory with each other or with any input."""
    if out.numel() and overlaps_itself(out):
        raise OverlapError(
            f"{op}: out with shape {tuple(out.shape)} and strides {out.stride()} overlaps itself"
        )
    check_no_overlap(op, out, **inputs)


def check_like(op: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, *like: torch.Tensor) -> None:
    """An output of just this shape and dtype, on the device of the first of `like`: all but its memory."""
    check_tensor(op, "out", out)
    check_constant(op, "out", out)
    check_may_change(op, out)
    if like:
        check_same_device(op, like[0], "out", out)
    if out.dtype != dtype:
        asking = "" if op in ("permute", "transpose") else ", or out_dtype to ask for another"
        raise DtypeError(f"{op}: out is {name_of(out.dtype)}: wanted {name_of(dtype)}{asking}")
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"{op}: out has shape {tuple(out.shape)}: wanted {tuple(shape)}")
    if out.is_conj() or out.is_neg():
        raise DtypeError(f"{op}: out is a lazily conjugated or negated view: wanted plain memory")


def check_no_overlap(op: str, out: torch.Tensor, **inputs: torch.Tensor) -> None:
    """An output that shares no memory with any input."""
    for name, tensor in inputs.items():
        if overlap(out, tensor):
            raise OverlapError(f"{op}: out overlaps {name}: wanted memory of its own")


def broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to. Raises ShapeError where there is none.

    `torch.broadcast_shapes` loads SymPy, which takes a process's first call a second and more; sizes that a
    compiler traces are left to it.
    """
    if any(isinstance(size, torch.SymInt) for size in (*one, *other)):
        try:
            return tuple(torch.broadcast_shapes(tuple(one), tuple(other)))
        except RuntimeError as error:
            raise ShapeError(f"{tuple(one)} and {tuple(other)} do not broadcast") from error
    short, long = sorted((tuple(one), tuple(other)), key=len)
    short = (1,) * (len(long) - len(short)) + short
    if any(x != y and x != 1 and y != 1 for x, y in zip(short, long, strict=True)):
        raise ShapeError(f"{tuple(one)} and {tuple(other)} do not broadcast")
    return tuple(y if x == 1 else x for x, y in zip(short, long, strict=True))
