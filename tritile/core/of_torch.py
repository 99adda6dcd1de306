"""Name all that tritile uses of torch and torch does not document; no other module names any of it.

A function that every launch calls is an alias of torch's own, and not wrapped in another.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch._functorch import pyfunctorch, utils, vmap
from torch._guards import TracingContext as _TracingContext
from torch._ops import OpOverload as _OpOverload
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _contextlib, _python_dispatch

_Function = TypeVar("_Function", bound=Callable[..., Any])
CHECKED_ON: Final = ("2.11", "2.13")
"""List the versions of torch on which these names were checked."""

# The current GPU. Names that only builds for CUDA have are None in other builds.

wait_on_gpu: Any = torch.cuda._sleep
"""Have the current stream do nothing for so many cycles of the GPU's clock: `torch.cuda._sleep`."""

current_gpu: Any = getattr(torch._C, "_cuda_getDevice", None)
"""Return the number of the current GPU: `torch._C._cuda_getDevice`."""

current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Return the current stream of a GPU as the driver's number: `torch._C._cuda_getCurrentRawStream`."""

empty_strided_on_gpu: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
"""Allocate on the current GPU without the dispatcher: `torch._C._dynamo.guards._empty_strided_cuda`."""

fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
"""Return the precision that torch is set to for fp32: `torch._C._get_fp32_precision_getter`."""

increment_versions: Final = torch._C._increment_version
"""Tell autograd that tensors were written: `torch._C._increment_version`, half of its wrapper's time."""

# The state that torch keeps for a call: modes, autocast, forward derivatives, transforms.

modes_entered: Final = torch._C._len_torch_dispatch_stack
"""Return how many `__torch_dispatch__` modes are on: `torch._C._len_torch_dispatch_stack`."""

without_modes: Final = _python_dispatch._disable_current_modes
"""Turn all modes off for a `with`: `torch.utils._python_dispatch._disable_current_modes`."""

is_any_autocast_on: Final = torch._C._is_any_autocast_enabled
"""Tell whether torch.autocast is on for any device: `torch._C._is_any_autocast_enabled`."""

forward_level: Final = functools.partial(getattr, forward_ad, "_current_level")
"""Read the level of forward derivatives, -1 outside all: the variable `forward_ad._current_level`."""

forward_recording: Final = forward_ad._set_fwd_grad_enabled
"""Turn tangents on or off for a `with`: `forward_ad._set_fwd_grad_enabled`."""

innermost_transform: Final = torch._C._functorch.peek_interpreter_stack
"""Return the innermost torch.func transform or None: `torch._C._functorch.peek_interpreter_stack`."""

current_transform: Final = pyfunctorch.retrieve_current_functorch_interpreter
"""Return the transform that runs: `torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter`."""

is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
"""Tell whether torch.func wraps a tensor: `torch._C._functorch.is_functorch_wrapped_tensor`."""

unwrap_batched: Final = vmap.unwrap_batched
"""Split arguments of vmap into tensors and batch dimensions: `torch._functorch.vmap.unwrap_batched`."""

add_batch_dim: Final = torch._C._functorch._add_batch_dim
"""Wrap a result of vmap with its batch dimension: `torch._C._functorch._add_batch_dim`."""

FakeTensor: TypeAlias = _FakeTensor
"""Stand for a tensor while a call is traced: `torch._subclasses.fake_tensor.FakeTensor`."""

TracingContext: TypeAlias = _TracingContext
"""Tell whether torch.compile traces in this thread: `torch._guards.TracingContext`."""


def alike(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return a test for tensors like these, in torch now: `torch._C._dynamo.guards.TensorGuards`."""
    guards: Any = torch._C._dynamo.guards.TensorGuards
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# Operators, and the dispatcher's keys.

OpOverload: TypeAlias = _OpOverload
"""Represent an overload of an operator: `torch._ops.OpOverload`."""

schema_of: Final[Callable[[Any], Any]] = attrgetter("_schema")
"""Return the schema of an overload: `OpOverload._schema`."""

DispatchKey: TypeAlias = torch._C.DispatchKey
"""Name a key of the dispatcher: `torch._C.DispatchKey`."""

DispatchKeySet: TypeAlias = torch._C.DispatchKeySet
"""Hold a set of keys: `torch._C.DispatchKeySet`."""

keys_of: Final = torch._C._dispatch_keys
"""Return the dispatch keys of a tensor: `torch._C._dispatch_keys`."""

KEYS_BELOW_AUTOGRAD: Final = torch._C._after_autograd_keyset
"""Hold all keys below autograd: `torch._C._after_autograd_keyset`."""

below_autograd: Final = torch._C._AutoDispatchBelowAutograd
"""Dispatch below autograd for a `with`: `torch._C._AutoDispatchBelowAutograd`."""

without_keys: Final = torch._C._ExcludeDispatchKeyGuard
"""Leave keys out of dispatch for a `with`: `torch._C._ExcludeDispatchKeyGuard`."""

SingleLevelFunction: TypeAlias = _SingleLevelFunction
"""Record a derivative at one level of transforms: `torch.autograd.function._SingleLevelFunction`."""

single_level: Final = utils.enable_single_level_autograd_function
"""Allow SingleLevelFunction for a `with`: functorch's `enable_single_level_autograd_function`."""

destroy: Final = torch.library.Library._destroy
"""Remove all that a library registered: `torch.library.Library._destroy`."""


def forget_dispatches(overload: Any) -> None:
    """Make tracing look up the kernels of an overload again: clear `OpOverload._dispatch_cache`."""
    getattr(overload, "_dispatch_cache", {}).clear()


def know_words(operator: Any, words: Sequence[str]) -> None:
    """Make sharded tensors tell calls apart by these keywords: `DTensor._op_dispatcher`."""
    from torch.distributed.tensor import DTensor  # takes long to import
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[operator] = RuntimeSchemaInfo(0, [*words] or None, needs_pytree=True)


# Tensors, products and modules.

neg_view: Final = torch._neg_view
"""Return a tensor's negative as a lazy view: `torch._neg_view`."""

storage_number: Final[Callable[[Any], Any]] = attrgetter("_cdata")
"""Return the address of a storage object, which no other has: `UntypedStorage._cdata`."""

int_mm: Any = torch._int_mm
"""Multiply int8 matrices into int32: `torch._int_mm`."""

scaled_mm: Any = torch._scaled_mm
"""Multiply fp8 matrices with scales: `torch._scaled_mm`."""

addmm_activation: Any = torch._addmm_activation
"""Multiply, add a bias, and apply relu or gelu by tanh in one call: `torch._addmm_activation`."""

grouped_mm: Any = torch._grouped_mm
"""Multiply groups of matrices: `torch._grouped_mm`."""

scaled_grouped_mm: Any = torch._scaled_grouped_mm
"""Multiply groups of fp8 matrices with scales: `torch._scaled_grouped_mm`."""

int4_packed: Any = torch._convert_weight_to_int4pack
"""Lay a weight of 4-bit numbers out as `int4_mm` wants it: `torch._convert_weight_to_int4pack`."""

int4_mm: Any = torch._weight_int4pack_mm
"""Multiply by a weight of 4-bit numbers: `torch._weight_int4pack_mm`."""


class Moved(torch.nn.Module):
    """Let a module do more when its tensors move or change type: `torch.nn.Module._apply`."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Moved":
        self._moved(functools.partial(super()._apply, fn, recurse))
        return self

    def _moved(self, tensors: Callable[[], Any]) -> None:
        """Move the tensors of the module, by calling `tensors`."""
        tensors()


# Objects of a thread, which torch carries to the threads that work for it.

kept_in_thread: Final = torch._C._get_obj_in_tls
"""Return the object that this thread keeps under a name: `torch._C._get_obj_in_tls`."""

is_kept_in_thread: Final = torch._C._is_key_in_tls
"""Tell whether this thread keeps an object under a name: `torch._C._is_key_in_tls`."""

keep_in_thread: Final = torch._C._stash_obj_in_tls
"""Keep an object in this thread: `torch._C._stash_obj_in_tls`."""

remove_from_thread: Any = getattr(torch._C, "_remove_obj_from_tls", None)
"""Remove an object from this thread: `torch._C._remove_obj_from_tls`, None in torch 2.11."""

# torch.compile.

context_decorator: Final = _contextlib.context_decorator
"""Run each call of a function in a context: `torch.utils._contextlib.context_decorator`."""


def untraced(function: _Function) -> _Function:
    """Make torch.compile run a function as it is: `_torchdynamo_disable`, and skipped frames."""
    # torch.compiler.disable would cost a microsecond at every call and import the compiler. A call inside a
    # compiled function is a graph break, and an error under fullgraph=True.
    marked: Any = function
    marked._torchdynamo_disable = True
    with contextlib.suppress(AttributeError):  # without these names some frames are compiled needlessly
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def trace_as_constant(function: Any) -> None:
    """Make torch.compile take the result of a function for a constant: `_dynamo_marked_constant`."""
    function._dynamo_marked_constant = True  # as assume_constant_result does, without importing the compiler


def print_no_candidates() -> None:
    """Stop max-autotune from printing candidates: `torch._inductor.select_algorithm.PRINT_AUTOTUNE`."""
    from torch._inductor import select_algorithm  # the compiler takes long to import

    select_algorithm.PRINT_AUTOTUNE = False
