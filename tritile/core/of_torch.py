"""The names of torch that it does not document, all that tritile stands on: nobody else names any.

What is called at every launch is torch's own function, and no function of ours around it.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch._functorch import pyfunctorch, utils, vmap
from torch._guards import TracingContext as _TracingContext
from torch._ops import OpOverload as _OpOverload
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _contextlib, _python_dispatch

CHECKED_ON: Final = ("2.11", "2.13")
"""The versions of torch that were seen to have these names."""

# The current GPU and its memory. What only builds for CUDA have is None in others.

current_gpu: Any = getattr(torch._C, "_cuda_getDevice", None)
"""Return the number of the current GPU: `torch._C._cuda_getDevice`."""

current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Return the current stream of a GPU as the driver's number: `torch._C._cuda_getCurrentRawStream`."""

empty_strided_on_gpu: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
"""Allocate on the current GPU, past torch's dispatcher: `_empty_strided_cuda`, of torch's compiled code."""

fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
"""Return torch's setting of products in fp32 for a backend and an operation: `_get_fp32_precision_getter`."""

# What torch keeps track of as a call is made.

modes_entered: Final = torch._C._len_torch_dispatch_stack
"""Return how many modes of `__torch_dispatch__` are on: `torch._C._len_torch_dispatch_stack`."""

without_modes: Final = _python_dispatch._disable_current_modes
"""Leave these modes for a `with`: `_disable_current_modes` of `torch.utils._python_dispatch`."""

is_any_autocast_on: Final = torch._C._is_any_autocast_enabled
"""Tell whether torch.autocast is on for any device: `torch._C._is_any_autocast_enabled`."""

forward_level: Final = functools.partial(getattr, forward_ad, "_current_level")
"""Return the level of forward derivatives, -1 outside: `forward_ad._current_level`, a variable."""

forward_recording: Final = forward_ad._set_fwd_grad_enabled
"""Set for a `with` whether tangents are carried on: `forward_ad._set_fwd_grad_enabled`."""

innermost_transform: Final = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transform of torch.func, None outside: functorch's `peek_interpreter_stack`."""

current_transform: Final = pyfunctorch.retrieve_current_functorch_interpreter
"""Return the transform whose kernel runs: `retrieve_current_functorch_interpreter` of functorch."""

is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
"""Tell whether a tensor is one of torch.func's wrappers: functorch's `is_functorch_wrapped_tensor`."""

unwrap_batched: Final = vmap.unwrap_batched
"""Return arguments without the batch of a level, and its dimensions: functorch's `unwrap_batched`."""

add_batch_dim: Final = torch._C._functorch._add_batch_dim
"""Wrap a result with the batch of a level: functorch's `_add_batch_dim`."""

FakeTensor: TypeAlias = _FakeTensor
"""Stand for a tensor where a call is traced: of `torch._subclasses.fake_tensor`."""

TracingContext: TypeAlias = _TracingContext
"""Tell of what torch.compile traces in this thread: of `torch._guards`."""

# Operators, and the dispatcher's keys.

OpOverload: TypeAlias = _OpOverload
"""An overload of an operator: of `torch._ops`."""

schema_of: Final[Callable[[Any], Any]] = attrgetter("_schema")
"""Return the schema of an overload: its `_schema`."""

DispatchKey: TypeAlias = torch._C.DispatchKey
"""A key of torch's dispatcher: of `torch._C`."""

DispatchKeySet: TypeAlias = torch._C.DispatchKeySet
"""A set of them: of `torch._C`."""

keys_of: Final = torch._C._dispatch_keys
"""Return the keys that a tensor is dispatched by: `torch._C._dispatch_keys`."""

KEYS_BELOW_AUTOGRAD: Final = torch._C._after_autograd_keyset
"""All keys below autograd: `torch._C._after_autograd_keyset`."""

below_autograd: Final = torch._C._AutoDispatchBelowAutograd
"""Dispatch below autograd for a `with`: `torch._C._AutoDispatchBelowAutograd`."""

without_keys: Final = torch._C._ExcludeDispatchKeyGuard
"""Dispatch past some keys for a `with`: `torch._C._ExcludeDispatchKeyGuard`."""

SingleLevelFunction: TypeAlias = _SingleLevelFunction
"""A derivative for one level of transforms: of `torch.autograd.function`."""

single_level: Final = utils.enable_single_level_autograd_function
"""Allow a SingleLevelFunction for a `with`: functorch's `enable_single_level_autograd_function`."""

destroy: Final = torch.library.Library._destroy
"""Take away what a library of operators registered: `Library._destroy`."""


def forget_dispatches(overload: Any) -> None:
    """Have an overload look up its kernels anew as it is traced: empties its `_dispatch_cache`."""
    getattr(overload, "_dispatch_cache", {}).clear()


def know_words(operator: Any, words: Sequence[str]) -> None:
    """Have sharded tensors' dispatch tell calls apart by these keywords: on `DTensor._op_dispatcher`."""
    from torch.distributed.tensor import DTensor  # takes long to import
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[operator] = RuntimeSchemaInfo(0, [*words] or None, needs_pytree=True)


# Tensors, products and modules.

neg_view: Final = torch._neg_view
"""Return a tensor's negative as a lazy view: `torch._neg_view`."""

storage_number: Final[Callable[[Any], Any]] = attrgetter("_cdata")
"""Return what tells a storage from all others: its `_cdata`."""

int_mm: Any = torch._int_mm
"""Multiply int8 matrices into int32: `torch._int_mm`."""

scaled_mm: Any = torch._scaled_mm
"""Multiply fp8 matrices with scales: `torch._scaled_mm`."""

grouped_mm: Any = torch._grouped_mm
"""Multiply groups of matrices: `torch._grouped_mm`."""

scaled_grouped_mm: Any = torch._scaled_grouped_mm
"""Multiply groups of fp8 matrices with scales: `torch._scaled_grouped_mm`."""


class Moved(torch.nn.Module):
    """A module that may do more as its tensors move, or change type: stands on `Module._apply`."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Moved":
        self._moved(functools.partial(super()._apply, fn, recurse))
        return self

    def _moved(self, tensors: Callable[[], Any]) -> None:
        """Call `tensors`, which moves all of the module's."""
        tensors()


# What torch carries to threads that work for another.

kept_in_thread: Final = torch._C._get_obj_in_tls
"""Return what is kept in this thread under a name: `torch._C._get_obj_in_tls`."""

is_kept_in_thread: Final = torch._C._is_key_in_tls
"""Tell whether anything is: `torch._C._is_key_in_tls`."""

keep_in_thread: Final = torch._C._stash_obj_in_tls
"""Keep something there: `torch._C._stash_obj_in_tls`."""

remove_from_thread: Any = getattr(torch._C, "_remove_obj_from_tls", None)
"""Keep nothing there: `torch._C._remove_obj_from_tls`, None in torch 2.11."""

# torch.compile.

context_decorator: Final = _contextlib.context_decorator
"""Return a function that is called within a context each time: of `torch.utils._contextlib`."""


def leave_untraced(function: Any) -> None:
    """Have torch.compile run a function as it is: its mark `_torchdynamo_disable`, and frames left alone."""
    function._torchdynamo_disable = True
    with contextlib.suppress(AttributeError):  # without these names frames may be compiled in vain
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def trace_as_constant(function: Any) -> None:
    """Have torch.compile run a function and take its result for a constant: `_dynamo_marked_constant`."""
    function._dynamo_marked_constant = True  # as assume_constant_result does, without importing the compiler


def print_no_candidates() -> None:
    """Have max-autotune print no table of its candidates: `torch._inductor.select_algorithm`."""
    from torch._inductor import select_algorithm  # the compiler takes long to import

    select_algorithm.PRINT_AUTOTUNE = False
