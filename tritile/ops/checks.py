"""Check arguments, as every operation does, before anything is launched."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch.autograd import forward_ad

from tritile.core.epilogue import ACTIVATIONS
from tritile.core.problem import FP8_DTYPES
from tritile.core.torch_private import FakeTensor, forward_level, is_transformed
from tritile.errors import (
    DeviceError,
    DtypeError,
    GradientError,
    InvalidValueError,
    OverlapError,
    ShapeError,
    UnsupportedError,
    did_you_mean,
)

_MAX_OVERLAP_WORK = 100_000  # steps of the exact overlap test; after these, memory counts as overlapping
_NUMBERS: Final = (complex, int, float, torch.SymInt, torch.SymFloat)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of dtypes, for a message: "bfloat16, float16"."""
    return ", ".join(map(name_of, dtypes))


def describe(tensor: Any) -> str:
    """Return a tensor's dtype, shape and device, for a message; for anything else its type and value."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {str(tensor)[:60]!r}"
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}"


# --- Tensors and numbers ---


def check_tensor(
    op: str, name: str, tensor: Any, *,
    like: torch.Tensor | None = None, dtypes: Sequence[torch.dtype] = (), rank: int | None = None,
) -> None:  # fmt: skip
    """Raise a TritileError unless an argument is a dense tensor on cuda, cpu or meta.

    It must also be on the device of `like`, the first operand, have one of `dtypes`, and `rank` dimensions,
    if these are passed.
    """
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{op}: {name} is {describe(tensor)}: expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise DtypeError(f"{op}: {name} is {kind}: expected a dense (strided) tensor")
    if tensor.device.type not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"{op}: {name} is on {tensor.device}: expected cuda, cpu or meta")
    if like is not None and tensor.device != like.device:
        raise DeviceError(
            f"{op}: {name} is on {tensor.device}: expected {like.device}, the device of the first operand"
        )
    if dtypes and tensor.dtype not in dtypes:
        raise DtypeError(f"{op}: {name} is {describe(tensor)}: expected {names_of(dtypes)}")
    if rank is not None and tensor.ndim != rank:
        raise ShapeError(f"{op}: {name} has shape {tuple(tensor.shape)}: expected {rank} dimensions")


def shapes(**tensors: torch.Tensor) -> str:
    """Return the shapes of two arguments, for a message: "a has shape (2, 3) and b (4, 5)"."""
    (name, tensor), (other_name, other) = tensors.items()
    return f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}"


def check_same_dtype(op: str, **tensors: torch.Tensor) -> None:
    """Raise DtypeError unless two arguments have one dtype."""
    (name, tensor), (other_name, other) = tensors.items()
    if tensor.dtype != other.dtype:
        kinds = f"{name} is {name_of(tensor.dtype)} and {other_name} {name_of(other.dtype)}"
        raise DtypeError(f"{op}: {kinds}: expected the same dtype")


def check_memory(op: str, *tensors: Any) -> None:
    """Raise UnsupportedError for a tensor without memory of its own: traced, or inside vmap or jvp.

    Arguments that are not tensors pass.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (is_transformed(tensor) or isinstance(tensor, FakeTensor)):
            raise UnsupportedError(
                f"{op}: {describe(tensor)} has no memory of its own (traced, or inside vmap or jvp): "
                "expected a plain tensor"
            )


def check_constant(op: str, **tensors: Any) -> None:
    """Raise GradientError for a tensor that requires a gradient or carries a tangent."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                f"{op}: {name} requires a gradient, but {op} computes none for it: "
                f"call it under torch.no_grad(), or pass {name}.detach()"
            )
        if forward_level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise GradientError(f"{op}: {name} carries a tangent, but {op} computes no derivative for it")


def capability(device: torch.device) -> tuple[int, int] | None:
    # Without CUDA here a tensor of a GPU is a fake one, of a GPU elsewhere.
    here = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if here else None


def check_gpu(op: str, a: torch.Tensor) -> None:
    """Raise UnsupportedError if the operand's GPU does not multiply its dtype."""
    name, found = name_of(a.dtype), capability(a.device)
    needed = (8, 9) if name in FP8_DTYPES else (8, 0) if name == "bfloat16" else (7, 5)
    if found is not None and found < needed:
        raise UnsupportedError(
            f"{op}: {name} needs compute capability {needed[0]}.{needed[1]}, but "
            f"{torch.cuda.get_device_name(a.device)} has {found[0]}.{found[1]}"
        )


def number_of(op: str, name: str, value: Any, like: torch.Tensor) -> complex:
    """Return a number, which may be symbolic, as a float, or for complex operands as a complex.

    Raises InvalidValueError for anything else. A bool is no number.
    """
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise InvalidValueError(f"{op}: {name} is {value!r}: expected a number")
    if isinstance(value, complex):
        if value.imag and not like.is_complex():
            expected = f"a real number for {name_of(like.dtype)}"
            raise InvalidValueError(f"{op}: {name} is {value!r}: expected {expected}")
        return value if like.is_complex() else value.real
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidValueError(f"{op}: {name} is an integer beyond the range of float64") from error


def check_activation(op: str, activation: Any, of: torch.Tensor | None = None) -> str:
    """Return the activation's name, "" for None. Raise InvalidValueError for an unknown one.

    Raise DtypeError if `of`, the first operand of the product, is complex.
    """
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        found = f"activation is {activation!r}{did_you_mean(activation, ACTIVATIONS)}"
        raise InvalidValueError(f"{op}: {found}: expected one of {', '.join(ACTIVATIONS)}, or None")
    if activation and of is not None and of.is_complex():
        dtype = name_of(of.dtype)
        raise DtypeError(f"{op}: activation is {activation!r} for {dtype}: expected None, or real operands")
    return activation or ""


def broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to. Raise ShapeError if there is none.

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


# --- The output ---


def check_may_change(op: str, out: torch.Tensor) -> None:
    """Raise GradientError for an inference tensor outside of `torch.inference_mode()`, as torch does."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise GradientError(
            f"{op}: out is an inference tensor: it can be written only inside torch.inference_mode()"
        )


def check_out(op: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    """Raise a TritileError unless out is None, or has this shape and dtype and is on the device of `like`.

    The memory of out is not checked.
    """
    if out is None:
        return
    check_tensor(op, "out", out, like=like)
    check_constant(op, out=out)
    check_may_change(op, out)
    if out.dtype != dtype:
        hint = "" if op in ("permute", "transpose") else ", or another out_dtype"
        raise DtypeError(f"{op}: out is {name_of(out.dtype)}: expected {name_of(dtype)}{hint}")
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"{op}: out has shape {tuple(out.shape)}: expected {tuple(shape)}")
    if out.is_conj() or out.is_neg():
        raise DtypeError(f"{op}: out is a lazily conjugated or negated view: expected a plain tensor")


def check_out_memory(op: str, out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Raise OverlapError if elements of out share memory with each other or with an input."""
    if out.numel() and overlaps_itself(out):
        raise OverlapError(
            f"{op}: out with shape {tuple(out.shape)} and strides {out.stride()} overlaps itself: "
            "expected memory of its own for each element"
        )
    for name, tensor in inputs.items():
        if tensor is not None and overlap(out, tensor):
            raise OverlapError(f"{op}: out overlaps {name}: expected memory of its own")


def reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((span + 1) * tensor.element_size())


def _addresses(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory for numpy's exact overlap test, which only compares addresses."""
    size = tensor.element_size()
    facts = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(step * size for step in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=facts))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors share a byte. Interleaved views, such as two columns of one matrix, do not.

    The answer of numpy.shares_memory is exact. If that takes over 100,000 steps, the tensors count as
    overlapping. Those on the meta device have no memory to share.
    """
    if a.is_meta or a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    a_at, b_at = a.data_ptr(), b.data_ptr()
    if a_at >= b_at + reach(b) or b_at >= a_at + reach(a):
        return False
    work: Any = _MAX_OVERLAP_WORK
    try:
        return bool(np.shares_memory(_addresses(a), _addresses(b), work))
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
        if a.is_meta or any(tensor.is_conj() or tensor.is_neg() for tensor in (a, b)):
            return False
        one, other = ((t.dtype, t.device, t.data_ptr(), t.shape, t.stride()) for t in (a, b))
        return bool(one == other)
    except (AttributeError, RuntimeError):  # not a tensor, or one without memory of its own
        return False
