"""Make torch's own products batch-invariant, by kernels in torch's dispatcher.

Each overload of `aten` that multiplies gets a kernel of ours at two keys of a device: at Autograd, where
derivatives are recorded and compilers trace, and below it, where inference tensors and calls that torch's own
kernels make arrive. Outside of `tritile.batch_invariant(torch=True)` both call the kernel that was there
before. They are registered once, on first use, because torch's dispatcher may not change while other threads
call it; from then on each product of torch's passes through Python twice.

The backward pass of a product follows its forward pass: what is recorded here are tritile's operators, which
keep the setting. Products that torch makes in a backward pass for anything else (a recomputed forward pass of
`torch.utils.checkpoint`, the formula of another operation) follow the call of `backward`, in whatever thread
they run.
"""

import threading
from collections.abc import Callable, Set
from typing import Any, Final

import torch

from tritile.core import torch_private
from tritile.core.settings import (
    chooses_torch,
    has_entered_invariance,
    invariantly,
    is_batch_invariant,
    is_batch_invariant_torch,
)
from tritile.core.torch_private import (
    DispatchKey,
    DispatchKeySet,
    is_any_autocast_on,
    is_dispatched,
    is_fake,
    without_keys,
)
from tritile.errors import (
    DeviceError,
    DtypeError,
    GradientError,
    InvalidValueError,
    OverlapError,
    ShapeError,
    UnsupportedError,
    brief,
)
from tritile.ops.dispatch import PLAIN
from tritile.ops.fused import addmm, baddbmm
from tritile.ops.grouped import grouped_matmul
from tritile.ops.matmul import bmm, matmul, mm
from tritile.ops.scaled import scaled_matmul

_DTYPES: Final = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_MIXED: Final = _DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32}  # ends of groups
_PLAIN: Final = frozenset(PLAIN)
_AUTOCAST: Final = DispatchKeySet(DispatchKey.AutocastCUDA) | DispatchKeySet(DispatchKey.AutocastCPU)
# A call that tritile does not make is torch's, whose own words say what is wrong with it, if anything is.
_TORCHS: Final = (
    DeviceError, DtypeError, GradientError, InvalidValueError, OverlapError, ShapeError, UnsupportedError,
)  # fmt: skip


class Last(threading.local):
    """Who made the last product of torch's in this thread: tritile, or why torch."""

    is_ours, why = False, ""


last: Final = Last()


# --- Each product of torch's, by ours ---


def _mv(mat: Any, vec: Any, **how: Any) -> torch.Tensor:
    if (mat.ndim, vec.ndim) != (2, 1):
        raise ShapeError("mv: expected a matrix and a vector")
    return matmul(mat, vec, **how)


def _dot(input: Any, other: Any, **how: Any) -> torch.Tensor:
    if (input.ndim, other.ndim) != (1, 1):
        raise ShapeError("dot: expected two vectors")
    return matmul(input, other, **how)


def _addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    column = input.unsqueeze(-1) if input.ndim else input
    made = addmm(column, mat, vec.unsqueeze(-1), beta=beta, alpha=alpha)
    return torch_private.unsafe_view(made, made.shape[:-1])


def _addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """A sum of products is one product, of the matrices side by side."""
    if batch1.ndim != 3 or batch2.ndim != 3 or batch1.shape[::2] != batch2.shape[:2]:
        raise ShapeError("addbmm: expected (B, M, K) and (B, K, N)")
    left = batch1.transpose(0, 1).flatten(1)
    return addmm(input, left, batch2.flatten(0, 1), beta=beta, alpha=alpha)


def _addmm_activation(
    input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> torch.Tensor:
    sums = addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return torch.nn.functional.gelu(sums, approximate="tanh") if use_gelu else torch.relu(sums)


def _scaled_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, scale_result: Any = None,
    out_dtype: Any = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    if scale_result is not None:
        raise UnsupportedError("_scaled_mm: tritile does not scale the result")
    how = {"out_dtype": out_dtype or a.dtype, "use_fast_accum": use_fast_accum}
    return scaled_matmul(a, b, scale_a, scale_b, bias=bias, **how)


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    if bias is not None:
        raise UnsupportedError("_grouped_mm: tritile adds no bias to groups")
    return grouped_matmul(a, b, offs, out_dtype=out_dtype)


def _scaled_grouped_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any = None, bias: Any = None,
    scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    if bias is not None or scale_result is not None:
        raise UnsupportedError("_scaled_grouped_mm: tritile adds no bias to groups, and scales no result")
    how: dict[str, Any] = {"out_dtype": out_dtype, "precision": "fast" if use_fast_accum else None}
    return grouped_matmul(a, b, offs, scale_a=scale_a, scale_b=scale_b, **how)


def _with_dtype(call: Callable[..., torch.Tensor], tensors: int) -> Callable[..., torch.Tensor]:
    """Return the call of the overload `dtype`, which takes out_dtype behind its tensors."""

    def run(*args: Any, **named: Any) -> torch.Tensor:
        return call(*args[:tensors], out_dtype=args[tensors], **named)

    return run


Made = Callable[..., torch.Tensor]
_PRODUCTS: Final[dict[str, Made]] = {
    "mm": mm,
    "mm.dtype": _with_dtype(mm, 2),
    "bmm": bmm,
    "bmm.dtype": _with_dtype(bmm, 2),
    "addmm": addmm,
    "addmm.dtype": _with_dtype(addmm, 3),
    "baddbmm": baddbmm,
    "baddbmm.dtype": _with_dtype(baddbmm, 3),
    "mv": _mv,
    "dot": _dot,
    "vdot": _dot,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "_addmm_activation": _addmm_activation,
    "_scaled_mm": _scaled_mm,
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _scaled_grouped_mm,
}
_WRITES: Final = (mm, bmm, addmm, baddbmm, _mv, _dot)  # those that take out
_IN_PLACE: Final = ("addmm", "baddbmm", "addmv", "addbmm")  # with an overload that changes its first tensor
# Their names, without those of overloads.
PRODUCTS: Final = frozenset(
    [*(name.partition(".")[0] for name in _PRODUCTS), *(f"{name}_" for name in _IN_PLACE)]
)


def _into(made: Made) -> Made:
    """Return the overload that writes to out, with torch's rules of its shape."""

    def run(*args: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        if made in _WRITES:
            try:
                return made(*args, out=out, **named)
            except (ShapeError, OverlapError):  # torch resizes out; operands that are wrong raise again
                pass
        found = made(*args, **named)
        if found.dtype != out.dtype:
            raise DtypeError(f"out has {out.dtype}, the product {found.dtype}")
        copied: torch.Tensor = torch.ops.aten.clone.out(found, out=out)  # which resizes out, and warns
        return copied

    return run


def _in_place(made: Made) -> Made:
    def run(input: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        found = made(input, *args, **named)
        if found.shape != input.shape:
            raise ShapeError("the result does not fit the tensor that it is written to")
        return input.copy_(found)

    return run


# --- The dispatcher ---


def _fault(name: str, tensors: list[torch.Tensor]) -> str:
    """Return why torch's own kernel makes this product, "" if tritile does."""
    is_mixed = name.startswith(("_scaled", "_grouped"))
    dtypes, first = _MIXED if is_mixed else _DTYPES, tensors[0].dtype
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype not in dtypes:
            return str(dtype)
        if tensor.layout != torch.strided:
            return f"{tensor.layout} tensors"
        if dtype != first and not is_mixed and ".dtype" not in name:
            return "tensors of several dtypes"  # an error of torch's
    return ""


def _is_for_its_class(tensors: list[torch.Tensor]) -> bool:
    """True of tensors whose class handles torch's operators, and calls them again on what it holds."""
    return any(
        type(each) not in PLAIN and is_dispatched(type(each)) and not is_fake(each) for each in tensors
    )


def _check_traced() -> None:
    """Raise UnsupportedError if torch's compiler traces a call, and may take the graph from its cache.

    That knows graphs by what they were before products were replaced; see `WithoutGraphCache`.
    """
    if has_entered_invariance() or not chooses_torch():
        return
    if torch_private.TracingContext.try_get() is not None and torch_private.backward_number() < 0:
        raise UnsupportedError(
            "torch.compile in a thread with a copied context: expected `with "
            "tritile.batch_invariant(torch=True):` in the thread itself, around the compiled function"
        )


def _override(name: str, key: str, made: Made) -> Callable[..., Any]:
    """Return the kernel of an overload at a key: `made` inside, what was there before outside."""
    torchs = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keyset: DispatchKeySet, *args: Any, **named: Any) -> Any:
        on, why = is_batch_invariant_torch(), ""
        if on or type(args[0]) not in _PLAIN:
            tensors = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
            is_plain = _PLAIN.issuperset(map(type, tensors))
            if not is_plain:
                on = on and not torch_private.lowers_backward()
                torch_private.guard_graph(is_batch_invariant_torch, on)  # if torch's compiler traces
            if on and (is_plain or not _is_for_its_class(tensors)):
                why = _fault(name, tensors)
                if not is_plain:
                    _check_traced()
                if not why:
                    here = is_batch_invariant()  # raises for a wrong variable of the environment
                    try:
                        result = _made(made, here, args, named)
                    except _TORCHS as error:
                        why = brief(error)
                    else:
                        last.is_ours = True
                        return result
        last.is_ours, last.why = False, why
        return torchs.call_boxed(keyset, *args, **named)

    return kernel


def _made(made: Made, here: bool, args: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """Return the product, batch-invariant. `here`: calls of this thread are."""
    if is_any_autocast_on():  # torch cast before, for what it casts; nothing more is to be
        with without_keys(_AUTOCAST), invariantly():
            return made(*args, **named)
    if here:
        return made(*args, **named)
    with invariantly():  # in a backward pass
        return made(*args, **named)


_LIBRARIES: Final[dict[str, torch.library.Library]] = {}
_installing: Final = threading.Lock()


def install(device: str = "CUDA") -> None:
    """Register the kernels for a device; once."""
    if device in _LIBRARIES:
        return
    with _installing:
        if device in _LIBRARIES:
            return
        torch_private.forget_graphs()
        library = torch.library.Library("aten", "IMPL")
        for name, made in _overloads().items():
            keys = (device,) if name.endswith("out") else (f"Autograd{device}", device)
            for key in keys:
                try:
                    kernel = _override(name, key, made)
                except RuntimeError:  # torch has no such product for this device
                    continue
                library.impl(name, kernel, key, with_keyset=True, allow_override=True)
            torch_private.forget_dispatch(_overload(name))
        _LIBRARIES[device] = library


def install_for_process() -> None:
    """Register the kernels in a process whose environment requests it, and let torch's compiler know."""
    install()
    torch_private.tag_graphs("tritile batch invariant")


def installed() -> Set[str]:
    """Return the devices whose products are made here."""
    return _LIBRARIES.keys()


def _overloads() -> dict[str, Made]:
    """Return each overload of torch's that this version has, and what makes it."""
    found = dict(_PRODUCTS)
    found |= {f"{name}_": _in_place(_PRODUCTS[name]) for name in _IN_PLACE}
    for name, made in _PRODUCTS.items():
        base, _, overload = name.partition(".")
        found[f"{base}.{overload}_out" if overload else f"{base}.out"] = _into(made)
    return {name: made for name, made in found.items() if _overload(name) is not None}


def _overload(name: str) -> Any:
    """Return an overload of torch's, None if this version does not have it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
