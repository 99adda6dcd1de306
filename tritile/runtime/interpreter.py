"""Run a compiled-mode kernel in Triton's interpreter, on tensors in host memory.

`triton.jit` decides once, when it decorates, whether a function will be compiled or interpreted. A library
needs both: one process multiplies host tensors and compiles for a GPU. So this module makes an interpreted
twin of a jitted function, with twins of the jitted functions it calls. While one runs, twins also replace
Triton's own library (`tl.cdiv`, `tl.sum` ...).
"""

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tritile.core.of_triton import (
    LANGUAGE_PATCHER,
    REDUCTIONS,
    Heuristics,
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterError,
    JITFunction,
    TensorHandle,
    interpreter_builder,
)
from tritile.core.source import named_values
from tritile.core.threads import at_fork, library_lock
from tritile.errors import InterpreterWarning, UnsupportedError, callers_level

_twins: dict[JITFunction, InterpretedFunction] = {}
_undoing: list[Callable[[], None]] = []  # functions that undo the patches in force, the latest last


def _after_fork(ended: bool) -> None:
    """Put back what another thread of the parent had patched, and drop the twins that it was making."""
    if ended:
        return
    while _undoing:
        _undoing.pop()()
    _twins.clear()
    _changes.clear()


at_fork(library_lock, _after_fork)


@contextlib.contextmanager
def _undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` at the end of the `with`; in a forked child that lacks this thread, the child calls it."""
    _undoing.append(undo)
    try:
        yield
    finally:
        undo()
        _undoing.pop()


_JITTED = (JITFunction, InterpretedFunction)  # triton.jit makes the latter if TRITON_INTERPRET is set


def _replace(namespace: dict[str, Any], path: list[str], value: Any) -> None:
    """Replace a global, or an attribute in copies of the modules and classes on the path to it."""
    first, *rest = path
    if rest:
        owner = namespace[first]
        if isinstance(owner, type):
            names = [name for name in dir(owner) if not name.startswith("__")]
            copy = types.SimpleNamespace(**{name: getattr(owner, name) for name in names})
        elif isinstance(owner, types.ModuleType | types.SimpleNamespace):
            copy = types.SimpleNamespace(**vars(owner))
        else:
            return
        _replace(vars(copy), rest, value)
        value = copy
    namespace[first] = value


def interpreted(kernel: Any) -> InterpretedFunction:
    """Return the twin of `kernel` that runs in the interpreter; `kernel` itself if it is one already.

    The interpreter keeps what it compiles for good, with names that it puts among the function's globals. A
    twin has globals of its own, so that these names are not lost when `_interpreted_library` restores
    Triton's modules.
    """
    if not isinstance(kernel, _JITTED) or hasattr(kernel.fn, "tritile_twin"):
        return kernel
    if kernel not in _twins:
        nonlocals = inspect.getclosurevars(kernel.fn).nonlocals
        # The interpreter compiles the source anew, and wants to see triton.language among its globals.
        namespace = {**kernel.fn.__globals__, **nonlocals, "__triton_language__": tl}
        function = types.FunctionType(
            kernel.fn.__code__, namespace, kernel.fn.__name__, kernel.fn.__defaults__, kernel.fn.__closure__
        )
        function.__annotations__ = kernel.fn.__annotations__
        function.__module__ = kernel.fn.__module__
        function.__qualname__ = kernel.fn.__qualname__
        vars(function)["tritile_twin"] = True
        _twins[kernel] = InterpretedFunction(function)
        for name, value in named_values(kernel.fn):
            if isinstance(value, tl.constexpr):  # which the interpreter's own functions do not handle
                _replace(namespace, name.split("."), value.value)
            elif isinstance(value, _JITTED):
                _replace(namespace, name.split("."), interpreted(value))
    return _twins[kernel]


_CLASSES = [tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
_CLASSES += [tl.condition] if hasattr(tl, "condition") else []  # from Triton 3.9 on
_PATCHED = (tl, tl.core, tl.math, tl.standard, *_CLASSES)
_ABSENT = object()
_changes: list[tuple[Any, str, Any, Any]] = []  # owner, name, Triton's attribute, the interpreter's


def _changed_language() -> list[tuple[Any, str, Any, Any]]:
    """Return what differs in `triton.language` while a kernel is interpreted.

    Its jitted functions are replaced by their twins, and the rest is patched as the interpreter does.
    """
    before = [(owner, dict(vars(owner))) for owner in _PATCHED]

    def changes() -> list[tuple[Any, str, Any, Any]]:
        return [
            (owner, name, attributes.get(name, _ABSENT), value)
            for owner, attributes in before
            for name, value in vars(owner).items()
            if attributes.get(name, _ABSENT) is not value
        ]

    with _undone(lambda: _restore(changes())):
        for name, function in before[0][1].items():
            if isinstance(function, _JITTED):
                setattr(tl, name, interpreted(function))
        for name in REDUCTIONS:  # other reductions go element by element
            setattr(tl.standard, name, interpreted(getattr(tl.standard, name)))
        getattr(*LANGUAGE_PATCHER)(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        return changes()


def _restore(changes: list[tuple[Any, str, Any, Any]]) -> None:
    for owner, name, value, _ in changes:
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


@contextlib.contextmanager
def _interpreted_library() -> Iterator[None]:
    """Patch `triton.language` for a kernel and all functions that it calls, and restore it afterwards.

    Left alone, the interpreter looks through all of the language at every call of a function, which takes
    most of its time, and does not restore what it patches for a function that the kernel calls.
    """
    whole = getattr(*LANGUAGE_PATCHER)
    if not _changes or any(vars(owner).get(name, _ABSENT) is not value for owner, name, value, _ in _changes):
        _changes[:] = _changed_language()
    changes = list(_changes)

    def undo() -> None:
        setattr(*LANGUAGE_PATCHER, whole)
        _restore(changes)

    with _undone(undo):
        for owner, name, _, value in changes:
            setattr(owner, name, value)
        setattr(*LANGUAGE_PATCHER, lambda function: types.SimpleNamespace(restore=lambda: None))
        yield


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    with _undone(lambda: setattr(owner, name, before)):
        setattr(owner, name, value)
        yield


def _unchecked() -> contextlib.AbstractContextManager[None]:
    """Spare the check of integers for overflow, which takes half of the time and reports nothing."""
    options = interpreter_builder.options
    return _patched(interpreter_builder, "options", replace(options, sanitize_overflow=options.debug))


def _summed_in_order() -> contextlib.AbstractContextManager[None]:
    """Have `tl.dot` add products one after the other, in the order of K.

    numpy leaves the order to a BLAS, which takes another at the edges of a matrix.
    """
    whole = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *how: Any) -> Any:
        for k in range(a.data.shape[-1]):
            column = TensorHandle(a.data[..., k : k + 1], a.dtype)
            row = TensorHandle(b.data[..., k : k + 1, :], b.dtype)
            acc = whole(self, column, row, acc, *how)
        return acc

    return _patched(InterpreterBuilder, "create_dot", create_dot)


def _truths_spread() -> contextlib.AbstractContextManager[None]:
    """Have comparisons of scalars give truth values when they are spread over a block.

    The interpreter makes them integers, which it refuses as a mask from Triton 3.9 on.
    """
    whole = InterpreterBuilder.create_splat

    def create_splat(self: Any, block: Any, scalar: Any) -> Any:
        if scalar.data.dtype == np.bool_:
            scalar = TensorHandle(scalar.data, tl.int1)
        return whole(self, block, scalar)

    return _patched(InterpreterBuilder, "create_splat", create_splat)


_made: dict[Any, dict[str, Any]] = {}  # by type: what its blocks and tensors hold beside their values


def _types_made_once() -> contextlib.ExitStack:
    """Have what follows from a type alone made once, where the interpreter makes it for each value.

    A fifth of the time goes into it otherwise, and more where blocks are small.
    """
    block, tensor = tl.block_type.__init__, tl.tensor.__init__

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        if key not in _made:
            block(self, element_ty, shape)
            _made[key] = dict(vars(self))
        vars(self).update(_made[key], element_ty=element_ty)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in _made:
            tensor(self, handle, type)
            _made[type.name] = dict(vars(self))
        vars(self).update(_made[type.name], handle=handle, type=type, dtype=type.scalar)

    with contextlib.ExitStack() as patches:
        patches.enter_context(_patched(tl.block_type, "__init__", make_block))
        patches.enter_context(_patched(tl.tensor, "__init__", make_tensor))
        return patches.pop_all()


def interpret(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any], in_order: bool = False
) -> None:
    """Run `kernel[grid](*args, **kwargs)` in the interpreter, one call at a time in a process.

    With TRITON_INTERPRET set, `triton.jit` has made an interpreted function, which is launched as it is.
    `in_order`: products of twins add up along K in one order, whatever the tiles.
    Raises UnsupportedError where Triton and numpy are of versions that cannot interpret together.
    """
    try:
        if isinstance(kernel, InterpretedFunction):
            with library_lock:
                kernel[grid](*args, **kwargs)
            return
        # A sum that overflows is infinite, as on a GPU: numpy need not warn.
        with (
            library_lock,
            np.errstate(all="ignore"),
            _summed_in_order() if in_order else contextlib.nullcontext(),
            _truths_spread(),
            _types_made_once(),
            _unchecked(),
            _interpreted_library(),
        ):
            interpreted(kernel)[grid](*args, **kwargs)
    except InterpreterError as error:
        if "0-dimensional arrays" not in str(error):
            raise
        raise UnsupportedError(
            f"the interpreter of triton {triton.__version__} cannot loop with numpy {np.__version__}: "
            "install triton 3.7 or later, or numpy before 2.4"
        ) from error


@functools.cache
def warn_interpreted() -> None:
    """Warn, once in a process and at the line that called tritile, that a kernel is interpreted."""
    warnings.warn(
        "kernels run in Triton's interpreter, thousands of times slower than on a GPU; results are right",
        InterpreterWarning,
        stacklevel=callers_level(),
    )


class HostAware:
    """Run a kernel compiled on GPU tensors, and interpreted on tensors in host memory."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getattr__(self, name: str) -> Any:
        if "fn" not in self.__dict__:  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["fn"], name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        host = bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)
        if host or triton.knobs.runtime.interpret:
            warn_interpreted()
            grid = kwargs["grid"]  # compiled kernels take lists, too
            kwargs["grid"] = (lambda named: tuple(grid(named))) if callable(grid) else tuple(grid)
        if not host:
            with library_lock:
                return self.fn.run(*args, **kwargs)
        kernel = self.fn
        while isinstance(kernel, Heuristics):
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
            kwargs |= {name: heuristic(named) for name, heuristic in kernel.values.items()}
            kernel = kernel.fn
        if not isinstance(kernel, JITFunction):  # TRITON_INTERPRET was set as triton.jit made it
            return self.fn.run(*args, **{"warmup": False} | kwargs)
        kwargs.pop("warmup", None)
        interpret(kernel, kwargs.pop("grid"), args, kwargs)
        return None
