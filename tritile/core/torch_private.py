"""Name all that tritile uses of torch and torch does not document; no other module names any of it.

A function that every launch calls is torch's own, and not wrapped in another. In the place of one that this
torch does not have is another way to the same, documented and slower; if there is none, what needs it
raises UnsupportedError.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import torch
from torch.autograd import forward_ad

from tritile.core.bound import bound

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._guards import TracingContext as TracingContext
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch.autograd.function import _SingleLevelFunction
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    SingleLevelFunction: TypeAlias = _SingleLevelFunction

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The current GPU.

# Return the number of the current GPU.
current_gpu: Any = bound("torch._C._cuda_getDevice", torch.cuda.current_device)
# Return the current stream of a GPU as the driver's number.
current_raw_stream: Any = bound(
    "torch._C._cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
# Allocate on the current GPU without the dispatcher; None in builds without CUDA.
empty_strided_on_gpu: Any = bound("torch._C._dynamo.guards._empty_strided_cuda", None)
# Return the precision that torch is set to for fp32, or None.
fp32_precision: Any = bound("torch._C._get_fp32_precision_getter", None)
# Tell autograd that tensors were written, in half the time of torch's wrapper.
increment_versions: Any = bound("torch._C._increment_version", torch.autograd.graph.increment_version)


def is_external(stream: torch.cuda.Stream) -> bool:
    """True of a stream that torch did not make, other than the default one: its id is its handle."""
    return stream.cuda_stream != 0 and stream.stream_id == stream.cuda_stream


# True if torch.use_deterministic_algorithms is on.
is_deterministic: Any = bound(
    "torch._C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


def constant_in_graphs(function: _Function) -> _Function:
    """Have torch's compiler call a function as it traces, and take the result for a constant.

    `torch._dynamo.assume_constant_result` does so, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The state that torch keeps for a call: modes, autocast, forward derivatives, transforms.

# Return how many `__torch_dispatch__` modes are on; some may be if torch does not say.
modes_entered: Any = bound("torch._C._len_torch_dispatch_stack", lambda: 1)
# True if torch.autocast is on for any device.
is_any_autocast_on: Any = bound(
    "torch._C._is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, ("cuda", "cpu")))
)
# Read the level of forward derivatives, -1 outside all; 0 if torch does not say, as there may be one.
forward_level: Final = functools.partial(getattr, forward_ad, "_current_level", 0)
# Turn tangents on or off for a `with`.
forward_recording: Any = bound("torch.autograd.forward_ad._set_fwd_grad_enabled")
# Return the innermost torch.func transform or None; there may be one if torch does not say.
innermost_transform: Any = bound("torch._C._functorch.peek_interpreter_stack", lambda: True)
# Return the transform that runs.
current_transform: Any = bound("torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter")
# True of a tensor that torch.func wraps; of any inside a transform if torch does not say.
is_transformed: Any = bound(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: innermost_transform() is not None
)
# Split arguments of vmap into tensors and batch dimensions.
unwrap_batched: Any = bound("torch._functorch.vmap.unwrap_batched")
# Wrap a result of vmap with its batch dimension.
add_batch_dim: Any = bound("torch._C._functorch._add_batch_dim")
if not TYPE_CHECKING:
    # Stand for a tensor while a call is traced.
    FakeTensor = bound("torch._subclasses.fake_tensor.FakeTensor")
    # Say if torch.compile traces in this thread.
    TracingContext = bound("torch._guards.TracingContext", type("Untraced", (), {"try_get": lambda: None}))
# True of a FakeTensor, functionalised or within a transform, too.
is_fake: Any = bound("torch._subclasses.fake_tensor.is_fake", lambda value: isinstance(value, FakeTensor))

_guards: Any = bound("torch._C._dynamo.guards.TensorGuards", None)
COMPARES: Final = _guards is not None  # False if `guard_of` cannot guard tensors


def guard_of(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return torch's guard for tensors like these in its present state. Requires COMPARES."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# Return the number of the backward pass that runs in this thread, -1 outside all.
backward_number: Any = bound("torch._C._current_graph_task_id", lambda: -1)
# What a thread keeps for itself and the backward passes that it starts: a value, and whether there is one.
_keep: Any = bound("torch._C._stash_obj_in_tls", lambda name, value: None)
_kept: Any = bound("torch._C._get_obj_in_tls", lambda name: None)
_is_kept: Any = bound("torch._C._is_key_in_tls", lambda name: False)


def kept_for_backward(name: str) -> Any:
    """Return what this thread keeps, or the one that started this backward pass; None if nothing."""
    return _kept(name) if _is_kept(name) else None


def keep_for_backward(name: str, value: Any) -> None:
    """Keep a value for this thread and the backward passes that it starts."""
    references = sys.getrefcount(value)
    _keep(name, value)
    if sys.getrefcount(value) == references:  # torch 2.11 gives back a reference that it did not take
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache
def _guard_of(function: Callable[[], bool], found: bool) -> Any:
    """Return a guard of torch's compiler: the function still returns what it did."""
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    def create(builder: Any, guard: Any) -> None:
        what = [f"{function.__module__}.{function.__qualname__}() is {found}"]
        builder.guard_manager.root.add_lambda_guard(lambda _: function() is found, what, guard.user_stack)

    return Guard(GlobalStateSource(), create)


class _OfThread(threading.local):
    entered_in: Any = None  # what was traced when this thread last entered a `with` that it has not left


_of_thread: Final = _OfThread()


@contextmanager
def entered_while_traced() -> Iterator[None]:
    """Know inside the `with`, which chooses a setting, if a function that is traced entered it.

    The choice is then the graph's own, and not one of who runs it.
    """
    before, _of_thread.entered_in = _of_thread.entered_in, TracingContext.try_get()
    try:
        yield
    finally:
        _of_thread.entered_in = before


def guard_graph(function: Callable[[], bool], found: bool) -> None:
    """Have the graph that is traced now, if one is, be used only where a function returns what it found.

    The function is called before each run of the graph, in the thread and context that runs it.
    """
    tracing = TracingContext.try_get()
    if tracing is not None and tracing is not _of_thread.entered_in:
        tracing.guards_context.dynamo_guards.add(_guard_of(function, found))


def forget_graphs() -> None:
    """Have torch's compiler trace all functions anew: its graphs lack guards of what they now depend on."""
    if "torch._dynamo" in sys.modules:
        import_module("torch._dynamo").reset_code_caches()


def forget_dispatch(operator: Any) -> None:
    """Let the compiler's own dispatcher find kernels that were registered after it first looked."""
    getattr(operator, "_dispatch_cache", {}).clear()


def tag_graphs(tag: str) -> None:
    """Have torch's compiler keep the graphs of this process, and of those it starts, apart from others."""
    name, config = "TORCH_COMPILE_CACHE_KEY_TAG", sys.modules.get("torch.compiler.config")
    before = os.environ.get(name, "")
    if tag not in before:
        os.environ[name] = f"{before}; {tag}" if before else tag
    if config is not None and tag not in getattr(config, "cache_key_tag", ""):
        config.cache_key_tag = os.environ[name]  # type: ignore[attr-defined]


class WithoutGraphCache:
    """Compile without the cache that knows graphs by what was traced, before products are replaced in it.

    `torch._functorch.config.enable_autograd_cache`. Some versions keep it for each thread, others for all:
    then the last thread to leave turns it on again, if it was on.
    """

    _lock, _count, _is_owed = threading.Lock(), 0, False

    def __enter__(self) -> None:
        config: Any = import_module("torch._functorch.config")
        self._config, self._is_own = config, False
        with self._lock:
            WithoutGraphCache._count += 1
            if config.enable_autograd_cache:
                config.enable_autograd_cache = False
                self._is_own = bool(Context().run(getattr, config, "enable_autograd_cache"))
                WithoutGraphCache._is_owed |= not self._is_own

    def __exit__(self, *_: object) -> None:
        with self._lock:
            WithoutGraphCache._count -= 1
            is_last = self._is_owed and self._count == 0
            if self._is_own or is_last:
                self._config.enable_autograd_cache = True
            WithoutGraphCache._is_owed &= not is_last


# Operators, and the dispatcher's keys.

if not TYPE_CHECKING:
    # Represent an overload of an operator.
    OpOverload = bound("torch._ops.OpOverload")
    # Name a key of the dispatcher, and hold a set of keys.
    DispatchKey = bound("torch._C.DispatchKey")
    DispatchKeySet = bound("torch._C.DispatchKeySet")
    # See each operator that is called inside a `with`.
    TorchDispatchMode = bound("torch.utils._python_dispatch.TorchDispatchMode")
    # Record a derivative at one level of transforms.
    SingleLevelFunction = bound("torch.autograd.function._SingleLevelFunction")
# True of an operator that consists of others.
_has_kernel: Any = bound("torch._C._dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
is_composite: Final = functools.cache(lambda op: _has_kernel(op.name(), "CompositeImplicitAutograd"))
# Return all values in nested containers, and the same containers with each value mapped.
leaves_of: Any = bound("torch.utils._pytree.tree_leaves")
map_leaves: Any = bound("torch.utils._pytree.tree_map")
schema_of: Final[Callable[[Any], Any]] = attrgetter("_schema")  # return the schema of an overload
# Hold all keys below autograd.
KEYS_BELOW_AUTOGRAD: Any = bound("torch._C._after_autograd_keyset")
# Dispatch below autograd for a `with`.
below_autograd: Any = bound("torch._C._AutoDispatchBelowAutograd")
# Leave keys out of dispatch for a `with`.
without_keys: Any = bound("torch._C._ExcludeDispatchKeyGuard")
# True of a class whose tensors handle operators themselves.
is_dispatched = functools.cache(lambda kind: kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def lowers_backward() -> bool:
    """True where torch's compiler lowers the backward pass of a graph that it traced before.

    It does so as that first runs, and traces products anew that it rewrites: whose these are was chosen.
    """
    if backward_number() < 0 or TracingContext.try_get() is None:
        return False
    compiled, dynamo = (
        sys.modules.get(f"torch._dynamo.{name}") for name in ("compiled_autograd", "symbolic_convert")
    )
    traces = getattr(getattr(dynamo, "tls", None), "current_tx", None) is not None
    return not traces and not getattr(compiled, "compiled_autograd_enabled", False)


def know_compiled_autograd(function: Any) -> None:
    """Let compiled autograd trace a SingleLevelFunction, as it does a torch.autograd.Function."""
    key = getattr(torch.autograd.Function, "_compiled_autograd_key", None)
    if key is not None:
        function._compiled_autograd_key = staticmethod(key)


# Allow SingleLevelFunction for a `with`.
single_level: Any = bound("torch._functorch.utils.enable_single_level_autograd_function")


def know_words(operator: Any, words: Sequence[str]) -> None:
    """Make sharded tensors distinguish calls by these keywords: `DTensor._op_dispatcher`."""
    from torch.distributed.tensor import DTensor  # takes long to import
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    schemas = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    schemas[operator] = RuntimeSchemaInfo(0, [*words] or None, needs_pytree=True)


# Tensors, products and modules.

# Return a tensor in another shape, not as a view to autograd: for one that nothing else refers to.
unsafe_view: Any = bound(
    "torch.ops.aten._unsafe_view.default", lambda tensor, shape: tensor.reshape(shape).clone()
)
# True of a view of another tensor, as autograd tracks it; of any if torch does not say.
is_view: Any = bound("torch.Tensor._is_view", lambda tensor: True)
# True of a tensor of zeros without memory, which torch makes in forward derivatives.
is_zero: Any = bound("torch.Tensor._is_zerotensor", lambda tensor: False)
# Return a tensor's negative, as a lazy view if torch makes one.
neg_view: Any = bound("torch._neg_view", torch.neg)
int_mm: Any = bound("torch._int_mm")  # multiply int8 matrices into int32
scaled_mm: Any = bound("torch._scaled_mm")  # multiply fp8 matrices with scales
# Multiply fp8 matrices with scales for blocks, of the kinds that ScalingType names.
block_scaled_mm: Any = bound("torch.nn.functional.scaled_mm")
ScalingType: Any = bound("torch.nn.functional.ScalingType")
# Multiply, add a bias, and apply relu or gelu by tanh in one call.
addmm_activation: Any = bound("torch._addmm_activation")
grouped_mm: Any = bound("torch._grouped_mm")  # multiply groups of matrices
# Multiply groups of fp8 matrices with scales.
scaled_grouped_mm: Any = bound("torch._scaled_grouped_mm")
# Lay a weight of 4-bit numbers out as `int4_mm` needs it.
int4_packed: Any = bound("torch._convert_weight_to_int4pack")
int4_mm: Any = bound("torch._weight_int4pack_mm")  # multiply by a weight of 4-bit numbers


class Moved(torch.nn.Module):
    """Let a module do more when its tensors move or change type: `torch.nn.Module._apply`."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Moved":
        self._moved(functools.partial(super()._apply, fn, recurse))
        return self

    def _moved(self, tensors: Callable[[], Any]) -> None:
        """Move the tensors of the module, by calling `tensors`."""
        tensors()


# torch.compile.


def is_traced_kernel(kernel: Any) -> bool:
    """True for a kernel that a tracer keeps: `torch._higher_order_ops`' `kernel_side_table`."""
    module = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    return module is not None and kernel in module.kernel_side_table.kernel_to_id
