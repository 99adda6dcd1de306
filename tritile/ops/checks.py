"""Check arguments, as every operation does, before anything is launched."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from tritile.core.of_torch import FakeTensor, forward_level, is_transformed
from tritile.errors import (
    DeviceError,
    DtypeError,
    GradientError,
    InvalidValueError,
    OverlapError,
    ShapeError,
    UnsupportedError,
)

_MAX_OVERLAP_WORK = 100_000  # steps of the exact overlap test; after these, memory counts as overlapping


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of dtypes, for a message: "bfloat16, float16"."""
    return ", ".join(map(name_of, dtypes))


def describe(tensor: Any) -> str:
    """Return dtype, shape and device of a tensor, for a message; of anything else its type and value."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {str(tensor)[:60]!r}"
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}"


def check_tensor(op: str, name: str, tensor: Any) -> None:
    """Raise DtypeError or DeviceError unless the argument is a dense tensor on cuda, cpu or meta."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{op}: {name} is {describe(tensor)}: wanted a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise DtypeError(f"{op}: {name} is {kind}: wanted a dense (strided) tensor")
    if tensor.device.type not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"{op}: {name} is on {tensor.device}: wanted cuda, cpu or meta")


def check_rank(op: str, name: str, tensor: Any, rank: int) -> None:
    """Raise ShapeError unless the tensor has `rank` dimensions; also what `check_tensor` raises."""
    check_tensor(op, name, tensor)
    if tensor.ndim != rank:
        raise ShapeError(f"{op}: {name} has shape {tuple(tensor.shape)}: wanted {rank} dimensions")


def check_memory(op: str, *tensors: Any) -> None:
    """Raise UnsupportedError for a tensor without memory of its own: traced, or inside vmap or jvp.

    Arguments that are not tensors pass.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (is_transformed(tensor) or isinstance(tensor, FakeTensor)):
            raise UnsupportedError(
                f"{op}: {describe(tensor)} has no memory of its own (traced, or inside vmap or jvp): "
                "wanted a plain tensor"
            )


def check_constant(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise GradientError for a tensor that requires a gradient or carries a tangent."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            f"{op}: {name} requires a gradient, but {op} computes none for it: "
            f"call it under torch.no_grad(), or pass {name}.detach()"
        )
    if forward_level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise GradientError(f"{op}: {name} carries a tangent, but {op} computes no derivative for it")


def check_may_change(op: str, out: torch.Tensor) -> None:
    """Raise GradientError for an inference tensor outside of `torch.inference_mode()`, as torch does."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise GradientError(
            f"{op}: out is an inference tensor: it can be written only inside torch.inference_mode()"
        )


def check_same_device(op: str, first: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """Raise DeviceError unless two tensors of a call are on one device."""
    if first.device != other.device:
        raise DeviceError(
            f"{op}: {name} is on {other.device}: wanted {first.device}, the device of the first operand"
        )


def check_operand(op: str, first: torch.Tensor, name: str, other: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Raise DtypeError or DeviceError unless an argument is of these dtypes and on the first's device."""
    check_tensor(op, name, other)
    check_same_device(op, first, name, other)
    if other.dtype not in dtypes:
        raise DtypeError(f"{op}: {name} is {describe(other)}: wanted {names_of(dtypes)}")


def check_number(op: str, name: str, value: Any) -> None:
    """Raise InvalidValueError unless an argument is a number, which may be symbolic. A bool is none."""
    kinds = complex | int | float | torch.SymInt | torch.SymFloat
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InvalidValueError(f"{op}: {name} is {value!r}: wanted a number")


def reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((span + 1) * tensor.element_size())


class _Memory:
    """Describe a tensor's memory to numpy's exact overlap test, which only compares addresses."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors share a byte. Interleaved views, such as two columns of one matrix, do not.

    The answer of numpy.shares_memory is exact. Where that takes over 100,000 steps, the tensors count as
    overlapping. Those on the meta device have no memory to share.
    """
    if a.is_meta or a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    a_at, b_at = a.data_ptr(), b.data_ptr()
    if a_at >= b_at + reach(b) or b_at >= a_at + reach(a):
        return False
    work: Any = _MAX_OVERLAP_WORK
    try:
        return bool(np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), work))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two indices may name one element: a stride lies within the reach of smaller ones.

    Exact for every view that slicing, transposing and expanding make. Some other strides that never meet
    count as overlapping too.
    """
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def same_memory(a: torch.Tensor, b: Any) -> bool:
    """True if two tensors are the same elements in the same memory; on the meta device, if they are one."""
    if b is a:
        return not (a.is_conj() or a.is_neg())
    try:
        plain = not (a.is_conj() or a.is_neg() or b.is_conj() or b.is_neg() or a.is_meta)
        return plain and (a.dtype, a.device) == (b.dtype, b.device) and _placed(a) == _placed(b)
    except (AttributeError, RuntimeError):  # not a tensor, or one without memory of its own
        return False


def _placed(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def check_out_memory(op: str, out: torch.Tensor, **inputs: torch.Tensor) -> None:
    """Raise OverlapError where elements of out share memory with each other or with an input."""
    if out.numel() and overlaps_itself(out):
        raise OverlapError(
            f"{op}: out with shape {tuple(out.shape)} and strides {out.stride()} overlaps itself"
        )
    for name, tensor in inputs.items():
        if overlap(out, tensor):
            raise OverlapError(f"{op}: out overlaps {name}: wanted memory of its own")


def check_out(op: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    """Raise a TritileError unless out has this shape and dtype and is on the device of `like`.

    The memory of out is not checked.
    """
    check_tensor(op, "out", out)
    check_constant(op, "out", out)
    check_may_change(op, out)
    check_same_device(op, like, "out", out)
    if out.dtype != dtype:
        asking = "" if op in ("permute", "transpose") else ", or out_dtype for another dtype"
        raise DtypeError(f"{op}: out is {name_of(out.dtype)}: wanted {name_of(dtype)}{asking}")
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"{op}: out has shape {tuple(out.shape)}: wanted {tuple(shape)}")
    if out.is_conj() or out.is_neg():
        raise DtypeError(f"{op}: out is a lazily conjugated or negated view: wanted plain memory")


def broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to. Raise ShapeError where there is none.

    `torch.broadcast_shapes` loads SymPy, which costs the first call of a process a second and more. Only
    sizes that a compiler traces are left to it.
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
