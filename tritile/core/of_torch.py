"""Name all that tritile uses of torch and torch does not document; no other module names any of it.

A function that every launch calls is an alias of torch's own, and not wrapped in another.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch._functorch import pyfunctorch, utils, vmap
from torch._guards import TracingContext as _TracingContext
from torch._ops import OpOverload as _OpOverload
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch._subclasses.fake_tensor import is_fake as _is_fake
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

_Function = TypeVar("_Function", bound=Callable[..., Any])
CHECKED_ON: Final = ("2.11", "2.13")  # versions of torch on which these names were checked

# The current GPU. Names that only builds for CUDA have are None in other builds.

# Have the current stream do nothing for so many cycles of the GPU's clock.
wait_on_gpu: Any = torch.cuda._sleep
current_gpu: Any = getattr(torch._C, "_cuda_getDevice", None)  # return the number of the current GPU
# Return the current stream of a GPU as the driver's number.
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Allocate on the current GPU without the dispatcher.
empty_strided_on_gpu: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
# Return the precision that torch is set to for fp32.
fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
# Tell autograd that tensors were written, in half the time of torch's wrapper.
increment_versions: Final = torch._C._increment_version

# True where torch.use_deterministic_algorithms is on.
is_deterministic: Final = torch._C._get_deterministic_algorithms


def constant_in_graphs(function: _Function) -> _Function:
    """Have torch's compiler call a function as it traces, and take the result for a constant.

    `torch._dynamo.assume_constant_result` does so, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The state that torch keeps for a call: modes, autocast, forward derivatives, transforms.

modes_entered: Final = torch._C._len_torch_dispatch_stack  # return how many `__torch_dispatch__` modes are on
# True where torch.autocast is on for any device.
is_any_autocast_on: Final = torch._C._is_any_autocast_enabled
# Read the level of forward derivatives, -1 outside all.
forward_level: Final = functools.partial(getattr, forward_ad, "_current_level")
forward_recording: Final = forward_ad._set_fwd_grad_enabled  # turn tangents on or off for a `with`
# Return the innermost torch.func transform or None.
innermost_transform: Final = torch._C._functorch.peek_interpreter_stack
# Return the transform that runs.
current_transform: Final = pyfunctorch.retrieve_current_functorch_interpreter
# True of a tensor that torch.func wraps.
is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_batched: Final = vmap.unwrap_batched  # split arguments of vmap into tensors and batch dimensions
add_batch_dim: Final = torch._C._functorch._add_batch_dim  # wrap a result of vmap with its batch dimension
FakeTensor: TypeAlias = _FakeTensor  # stand for a tensor while a call is traced
is_fake: Final = _is_fake  # True of a FakeTensor, functionalised or within a transform, too
TracingContext: TypeAlias = _TracingContext  # says if torch.compile traces in this thread


def alike(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return a test for tensors like these, in torch now: `torch._C._dynamo.guards.TensorGuards`."""
    guards: Any = torch._C._dynamo.guards.TensorGuards
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# Operators, and the dispatcher's keys.

OpOverload: TypeAlias = _OpOverload  # represent an overload of an operator
schema_of: Final[Callable[[Any], Any]] = attrgetter("_schema")  # return the schema of an overload
DispatchKey: TypeAlias = torch._C.DispatchKey  # name a key of the dispatcher
DispatchKeySet: TypeAlias = torch._C.DispatchKeySet  # hold a set of keys
KEYS_BELOW_AUTOGRAD: Final = torch._C._after_autograd_keyset  # hold all keys below autograd
below_autograd: Final = torch._C._AutoDispatchBelowAutograd  # dispatch below autograd for a `with`
without_keys: Final = torch._C._ExcludeDispatchKeyGuard  # leave keys out of dispatch for a `with`
SingleLevelFunction: TypeAlias = _SingleLevelFunction  # record a derivative at one level of transforms
single_level: Final = utils.enable_single_level_autograd_function  # allow SingleLevelFunction for a `with`


def know_words(operator: Any, words: Sequence[str]) -> None:
    """Make sharded tensors distinguish calls by these keywords: `DTensor._op_dispatcher`."""
    from torch.distributed.tensor import DTensor  # takes long to import
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    schemas = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    schemas[operator] = RuntimeSchemaInfo(0, [*words] or None, needs_pytree=True)


# Tensors, products and modules.

# Return a tensor in another shape, not as a view to autograd: for one that nothing else refers to.
unsafe_view: Any = torch.ops.aten._unsafe_view.default
is_view: Final = torch.Tensor._is_view  # of another tensor, as autograd tracks it
neg_view: Final = torch._neg_view  # return a tensor's negative as a lazy view
int_mm: Any = torch._int_mm  # multiply int8 matrices into int32
scaled_mm: Any = torch._scaled_mm  # multiply fp8 matrices with scales
# Multiply, add a bias, and apply relu or gelu by tanh in one call.
addmm_activation: Any = torch._addmm_activation
grouped_mm: Any = torch._grouped_mm  # multiply groups of matrices
scaled_grouped_mm: Any = torch._scaled_grouped_mm  # multiply groups of fp8 matrices with scales
# Lay a weight of 4-bit numbers out as `int4_mm` wants it.
int4_packed: Any = torch._convert_weight_to_int4pack
int4_mm: Any = torch._weight_int4pack_mm  # multiply by a weight of 4-bit numbers


class Moved(torch.nn.Module):
    """Let a module do more when its tensors move or change type: `torch.nn.Module._apply`."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Moved":
        self._moved(functools.partial(super()._apply, fn, recurse))
        return self

    def _moved(self, tensors: Callable[[], Any]) -> None:
        """Move the tensors of the module, by calling `tensors`."""
        tensors()


# torch.compile.


def print_no_candidates() -> None:
    """Stop max-autotune from printing candidates: `torch._inductor.select_algorithm.PRINT_AUTOTUNE`."""
    from torch._inductor import select_algorithm  # the compiler takes long to import

    select_algorithm.PRINT_AUTOTUNE = False
