"""Take a call from its arguments to its launch: looked up, or checked, described and prepared.

A public function asks `tritile.ops.memo.recall` first. Every operation says what a call asks for, an `Asked`,
in a function of all arguments that `asks` registers. That is what runs, is traced, and is planned.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from tritile.core import settings
from tritile.core.call import Call
from tritile.core.log import log
from tritile.core.of_torch import constant_in_graphs
from tritile.core.of_triton import INTERPRETING
from tritile.core.problem import MatmulProblem, suits
from tritile.core.settings import rules
from tritile.errors import TritileError, UnsupportedError, brief
from tritile.ops.aten import BYTES, LOWERED, by_torch
from tritile.ops.dispatch import PLAIN, call_operator, needs_dispatch, sees_every_call
from tritile.ops.memo import Key, Tensors, recall, remember
from tritile.ops.run import interpret_product, is_by_aten, mark_written, on_host, prepared
from tritile.ops.signatures import joined
from tritile.planning.aten import is_torch_only

Change = Callable[[torch.Tensor], torch.Tensor]
Result = tuple[tuple[int, ...], torch.dtype, str]


class Asked:
    """Hold what a caller asks of an operation: the tensors, as given, and the options.

    An operation defines `checked` and `call`. The rest is what most operations do. `tensors` are in the order
    of `tritile.ops.signatures.TENSORS`.
    """

    op: str
    tensors: Tensors

    is_empty = False  # nothing to compute, although the result has elements

    @property
    def first(self) -> Any:
        """Return the first operand, on whose device the result is."""
        return self.tensors[0]

    def checked(self, out: Any) -> Result:
        """Return shape and dtype of the result, and the precision. Raise a TritileError for bad arguments.

        out may be None; its memory is not checked.
        """
        raise NotImplementedError

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError where the memory of out overlaps."""

    def call(self, change: Change, out: torch.Tensor, how: str) -> Call:
        """Return the described call, in the precision `how`, after `change` was applied to every operand."""
        raise NotImplementedError

    def run_otherwise(self, out: torch.Tensor | None, how: str) -> torch.Tensor | None:
        """Return the result where another operation computes it, else None."""
        return None

    def fill(self, out: torch.Tensor) -> None:
        """Store the result where `is_empty`."""
        out.zero_()

    def compute(self, out: torch.Tensor) -> None:
        """Compute tensors in host memory by torch: see `tritile.ops.reference`."""
        raise NotImplementedError

    def interpret(self, out: torch.Tensor, how: str) -> None:
        """Run the kernels in Triton's interpreter."""
        interpret_product(self.call, (self.first, *self.tensors), out, how)


_Makes = TypeVar("_Makes", bound=Callable[..., Asked])

# What each operation computes, by all of its arguments. It may raise a TritileError for bad ones.
ASKED: Final[dict[str, Callable[..., Asked]]] = {}


def asks(op: str) -> Callable[[_Makes], _Makes]:
    def register(function: _Makes) -> _Makes:
        ASKED[op] = function
        return function

    return register


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def computed(op: str, tensors: Tensors, out: Any, options: Key) -> torch.Tensor:
    """Compute what `recall` does not know, at once or through torch's dispatcher."""
    if is_dynamo_compiling() and out is None and settings.may_lower and _is_static(tensors, options):
        facts = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        if _is_lowered(op, facts, options):
            return LOWERED[op](tensors, options)
    if needs_dispatch(*tensors, out):
        values = joined(op, tensors, options)
        return call_operator(op, values, out, lambda: ASKED[op](*values).checked(out))
    return eager(op, tensors, out, options)


def _is_static(tensors: Tensors, options: Key) -> bool:
    """True of plain tensors, or None, and options whose numbers torch's compiler takes for constants."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to load, and loaded by then

    for option in options:
        if isinstance(option, int | float) and not has_static_value(option):
            return False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return False
        for size in (*tensor.shape, *tensor.stride()):
            if not has_static_value(size):
                return False
    return True


@constant_in_graphs
def _is_lowered(op: str, facts: Key, options: Key) -> bool:
    """True if a call that torch's compiler traces is planned by torch's kernel: its graph then has torch's.

    `facts` has shape, strides, dtype and device of each tensor. What is planned later, after measuring, does
    not change a graph that is compiled.
    """
    first, real = facts[0][3], not any(isinstance(option, complex) for option in options)
    is_plain = op in LOWERED and facts[0][2] not in BYTES and not facts[0][2].is_complex and real
    if not is_plain or sees_every_call() or torch.compiler.is_exporting():
        return False
    if first.type != "cuda" or any(each is not None and each[3] != first for each in facts):
        return False
    tensors = [
        None if each is None else torch.empty_strided(*each[:2], dtype=each[2], device="meta")
        for each in facts
    ]
    try:
        if not rules().aten:
            return False
        of = ASKED[op](*joined(op, tensors, options))
        shape, dtype, how = of.checked(None)
        problem = of.call(unchanged, torch.empty(shape, dtype=dtype, device="meta"), how).problem
        # A precision that nobody names depends on the GPU, which meta tensors do not tell.
        if not isinstance(problem, MatmulProblem) or 0 in shape or of.is_empty:
            return False
        if dtype == torch.float32 and suits(problem.m, problem.n, problem.k):
            return False
        return by_torch(of, problem, how, None) is not None and is_by_aten(problem, first.index)
    except TritileError:  # the operator raises it
        return False


def eager(op: str, tensors: Tensors, out: Any, options: Key) -> torch.Tensor:
    """Compute what `recall` does not know on plain tensors, and have it know the launch."""
    of = ASKED[op](*joined(op, tensors, options))
    rules()  # report a wrong setting of the environment on any device
    shape, dtype, how = of.checked(out)
    if out is not None:
        of.check_memory(out)
    done = of.run_otherwise(out, how)
    if done is not None:
        return done
    result = torch.empty(shape, dtype=dtype, device=of.first.device) if out is None else out
    if result.numel() == 0:
        return result
    if not of.first.is_meta:
        if of.is_empty:
            of.fill(result)
        elif on_host(of.first):
            if INTERPRETING and not is_torch_only(of.call(unchanged, result, how).problem):
                of.interpret(result, how)
            else:
                of.compute(result)
        else:
            call = of.call(unchanged, result, how)
            torchs = by_torch(of, call.problem, how, out) if rules().aten else None
            if torchs is not None and is_by_aten(call.problem, of.first.device.index):
                remember(op, options, torchs, call, tensors, out, result, by_torch=True)
                problem = call.problem
                if out is None:
                    del call, result  # torch allocates its own
                try:
                    return torchs(*tensors) if out is None else mark_written(op, torchs(*tensors, out))
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError) as error:  # torch says what it does not support
                    why = brief(error)
                    if is_torch_only(problem):
                        raise UnsupportedError(f"{op}: torch refuses it: {why}") from error
                    log("compile", logging.WARNING, problem=problem.label, config="aten", failure=why)
                result = torch.empty(shape, dtype=dtype, device=of.first.device) if out is None else out
                call = of.call(unchanged, result, how)
            launch = prepared(call)
            launch(*call.tensors)
            remember(op, options, launch, call, tensors, out, result)
    return result if out is None else mark_written(op, result)


def run_plain(op: str, tensors: Tensors, out: Any, options: Key) -> torch.Tensor:
    """Compute an operation on plain tensors: the kernel of its operator on CUDA and CPU."""
    return recall(op, tensors, out, options, eager)
