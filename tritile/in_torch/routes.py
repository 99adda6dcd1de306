"""Decide which calls of torch tritile handles: once for all alike, then by one look-up and a launch."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from tritile.core.forgetting import new_memo
from tritile.core.settings import current_mode, rules
from tritile.in_torch.deciding import (
    OPS,
    Known,
    capturing,
    decide_copy,
    decide_product,
    describe_product,
    outermost_first,
    passed_through,
    result_shape,
)
from tritile.in_torch.state import Entry, paused
from tritile.in_torch.tally import BRIEF, Verdict
from tritile.ops.checks import ranges_meet, same_memory
from tritile.ops.memo import NEVER_PREPARED, Ready, addresses_of, default_precision, launch_ready
from tritile.ops.permute import described as described_copy
from tritile.ops.run import interpret, interpret_product, may_be_kept

# Limits of brief calls, which take torch's host longer than the GPU.
FEW_ROWS: Final = 16
SMALL: Final = 1 << 24  # elements of the second factor: a GPU reads 32 MiB of 16-bit weights in under 10 us
LITTLE: Final = 1 << 18  # bytes of a copy's source


_memo: dict[tuple[Any, ...], Known] = new_memo()


_BARE: Final = {
    call: passed_through(call, "", "a tensor without memory of its own") for call in (*OPS, "clone")
}
_APART: Final = {call: passed_through(call, "", "out shares memory with an input") for call in OPS}


def _key_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what of a tensor decides about a call. Raise RuntimeError where it has no dense memory."""
    address = tensor.data_ptr()
    if not address >> 40 and address == tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise RuntimeError("a storage that was resized to nothing")  # its address is the offset
    return (
        type(tensor),
        tensor.dtype,
        tensor.get_device(),
        address % 16,
        tensor.shape,
        tensor.stride(),
        tensor.is_neg(),
        tensor.is_conj(),
    )


def _may_be_brief(entry: Entry) -> bool:
    """Tell whether brief calls are passed through undecided: not where all calls are handled, or measured."""
    return entry.policy == "expected" and current_mode() != "tune"


def brief_product(call: str, entry: Entry, tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a product is passed through as brief: few rows by a small matrix, outside a capture.

    Decoding makes hundreds of these in a row, each of which takes torch's host longer than the GPU. Asked
    where Python decides every time. Of calls that C++ can learn, only batches are passed through so: the
    sizes of attention grow with every token, and planning each takes longer than multiplying.
    """
    a, b = tensors[-2:]
    if not _may_be_brief(entry) or a.ndim < 2 or a.shape[-2] > FEW_ROWS or b.numel() > SMALL:
        return False  # torch refuses one dimension itself
    if a.is_cuda and capturing():
        return False
    entry.report.add(BRIEF[call])
    return True


def brief_copy(entry: Entry, x: torch.Tensor) -> bool:
    """Tell whether a copy is passed through as brief: a small one, outside a capture."""
    if not _may_be_brief(entry) or x.nbytes > LITTLE or (x.is_cuda and capturing()):
        return False
    entry.report.add(BRIEF["clone"])
    return True


Learn = Callable[[Verdict, Ready | None], None]


def product(
    call: str, entry: Entry, tensors: Sequence[torch.Tensor], options: Any, learn: Learn | None = None
) -> torch.Tensor | None:
    """Return the result of torch's `mm`, `bmm`, `addmm` or `baddbmm`; None where it is passed through.

    `tensors` are the positional arguments, `options` the others that were given: beta, alpha, out. `learn`,
    where given, is told the decision, so that C++ handles calls alike.
    """
    out, beta, alpha = options.get("out"), options.get("beta", 1), options.get("alpha", 1)
    try:
        setting = default_precision() if tensors[-1].dtype is torch.float32 else "ieee"
        quick = learn is not None
        modes = (call, entry.policy, setting, rules(), quick, tensors[-1].is_cuda and capturing())
        weights = (beta, type(beta), alpha, type(alpha))
        key = (modes, weights, None if out is None else _key_of(out), *map(_key_of, tensors))
        known = _memo.get(key)
    except NEVER_PREPARED:
        entry.report.add(_BARE[call].verdict)
        return None
    if known is None:
        known = _kept(key, decide_product(call, entry.policy, tensors, (beta, alpha), out, setting, quick))
    if learn is not None and (known.ready is not None or not known.verdict.taken):
        learn(known.verdict, known.ready)
    if out is not None and known.verdict.taken and _clashes(tensors, out, known.reaches):
        known = _APART[call]
    entry.report.add(known.verdict)
    if not known.verdict.taken:
        return None
    if known.ready is None:
        return _interpreted(tensors, (beta, alpha), out, "ieee" if setting == "none" else setting)
    return launch_ready(known.ready, addresses_of(*tensors, out), out)


def copy(
    entry: Entry, x: torch.Tensor, form: torch.memory_format, learn: Learn | None = None
) -> torch.Tensor | None:
    """Return x in memory of this format, as torch's `clone` does; None where it is passed through."""
    try:
        quick = learn is not None
        modes = ("clone", entry.policy, rules(), quick, x.is_cuda and capturing())
        key = (modes, _key_of(x), form)
        known = _memo.get(key)
    except NEVER_PREPARED:
        entry.report.add(_BARE["clone"].verdict)
        return None
    if known is None:
        known = _kept(key, decide_copy(entry.policy, x, form, quick))
    if learn is not None and (known.ready is not None or not known.verdict.taken):
        learn(known.verdict, known.ready)
    entry.report.add(known.verdict)
    if not known.verdict.taken:
        return None
    if known.ready is not None:
        return launch_ready(known.ready, addresses_of(x, None), None)
    with paused():
        out = torch.empty_like(x.detach(), memory_format=form)
        dims = outermost_first(out)
        interpret(described_copy(x.detach().permute(dims), out.permute(dims), range(x.ndim)))
    return out


def _kept(key: tuple[Any, ...], known: Known) -> Known:
    if may_be_kept():
        _memo[key] = known
    return known


def _clashes(tensors: Sequence[torch.Tensor], out: torch.Tensor, reaches: tuple[int, ...]) -> bool:
    """Tell whether out shares memory with an input that is read. It may be exactly what is added."""
    *of_tensors, of_out = reaches
    factors = len(tensors) - 2
    return any(
        far and ranges_meet(tensor, far, out, of_out) and not (i < factors and same_memory(tensor, out))
        for i, (tensor, far) in enumerate(zip(tensors, of_tensors, strict=True))
    )


def _interpreted(
    tensors: Sequence[torch.Tensor], weights: tuple[Any, Any], out: torch.Tensor | None, precision: str
) -> torch.Tensor:
    """Compute a product in the interpreter."""
    if out is None:
        out = tensors[-1].new_empty(result_shape(tensors))
    with paused():
        interpret_product(
            lambda read, *rest: describe_product(
                [read(tensor.detach()) for tensor in tensors], weights, *rest
            ),
            tensors,
            out.detach(),
            precision,
        )
    return out
