"""Arguments of decorated kernels: checked against the kernel, and named as in the store.

Types count in names: A=1, A=True and A=1.0 compile three kernels. Values other than numbers and short text
(dtypes, tuples, functions, hooks) are named by type and a digest of their content, the same in every process.
"""

import dataclasses
import dis
import functools
import hashlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritile.core.config import Config
from tritile.core.settings import EFFORTS, MODES
from tritile.core.source import source_hash
from tritile.core.triton_private import (
    Autotuner,
    Heuristics,
    InterpretedFunction,
    JITCallable,
    JITFunction,
    backends,
)
from tritile.errors import InvalidValueError, callers_level, did_you_mean
from tritile.tuner.search import Space

DESCRIPTORS: Final = frozenset({TensorDescriptor, GluonDescriptor})  # their dtype is that of their tensor
SCALARS: Final = frozenset({int, bool, str, type(None), torch.dtype, tl.dtype})  # hashable, equal to itself
_MAX_TEXT: Final = 64  # characters of a value in a `Config`
_MAX_INT: Final = 2**31
_LAUNCHING: Final = {"grid", "warmup"}  # keyword arguments of a launch
_LAYERS: Final = (Heuristics, JITFunction, InterpretedFunction)  # take no arguments besides the kernel's
_TRITONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # options of every backend


# Checks.


def layers_of(fn: Any) -> list[Any]:
    """Return a kernel's layers from the outside in: heuristics, the jitted kernel, its Python function."""
    layers = [fn]
    while not inspect.isfunction(layers[-1]) and hasattr(layers[-1], "fn"):
        layers.append(layers[-1].fn)
    return layers


def constants_of(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)}


def set_by(configs: Any) -> set[str]:
    if isinstance(configs, Space):
        return {*configs.parameters, *triton.Config({}).all_kwargs()}
    return {name for config in configs or () for name in config.all_kwargs()}


def _computed(fn: Any, configs: Any) -> set[str]:
    """Return the names of arguments that configs or heuristics set, which no caller passes."""
    return set_by(configs).union(*(getattr(layer, "values", ()) for layer in layers_of(fn)))


def _options() -> set[str]:
    """Return what a config may set besides its kernel's arguments: the options of Triton's backends."""
    modules = [sys.modules[backend.compiler.__module__] for backend in backends.values()]
    kinds = [kind for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    return {field.name for kind in kinds for field in dataclasses.fields(kind)} | {*_TRITONS}


_PRUNING: Final = "early_config_prune", "perf_model", "top_k"


def check_options(
    configs: Any, prune_configs_by: Any, mode: str | None, effort: str | None, reference: Any, tolerance: Any,
    **deprecated: Any,
) -> None:  # fmt: skip
    """Raise InvalidValueError for invalid options of `autotune`; warn of deprecated ones."""
    if mode is not None and mode not in MODES:
        raise InvalidValueError(f"mode is {mode!r}: expected one of {', '.join(MODES)}, or None")
    if effort is not None and effort not in EFFORTS:
        raise InvalidValueError(f"effort is {effort!r}: expected one of {', '.join(EFFORTS)}, or None")
    if unknown := [name for name in prune_configs_by or () if name not in _PRUNING]:
        hint = did_you_mean(unknown[0], _PRUNING)
        raise InvalidValueError(
            f"prune_configs_by has {unknown[0]!r}{hint}: expected {', '.join(_PRUNING)}, as in Triton"
        )
    if isinstance(configs, Space) and prune_configs_by:
        raise InvalidValueError("prune_configs_by is for a list of configs: a Space has `where`")
    listed = isinstance(configs, list | tuple) and all(isinstance(c, triton.Config) for c in configs)
    if not (configs is None or listed or isinstance(configs, Space)):
        expected = "expected a list of triton.Config, or a tritile.Space"
        raise InvalidValueError(f"configs is {configs!r}: {expected}")
    if tolerance is not None:
        number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
        if not (number and 0 <= tolerance < math.inf):
            raise InvalidValueError(f"tolerance is {tolerance!r}: expected a relative error, 0 or above")
        if reference is None:
            raise InvalidValueError("tolerance without a reference: there is no answer to compare with")
    if passed := ", ".join(name for name, value in deprecated.items() if value):
        text = f"{passed}: deprecated in triton.autotune, without effect here: do_bench= sets another timing"
        warnings.warn(text, DeprecationWarning, stacklevel=callers_level())


def check_kernel(
    fn: Any, configs: Any, key: Any, reset_to_zero: Any, restore_value: Any, reference: Any, bucket: Any,
    is_whole: bool = True,
) -> None:  # fmt: skip
    """Raise InvalidValueError, naming parameter and kernel, if an option does not fit the kernel.

    `is_whole`: configs run as listed. A pruning, or a layer of the kernel that is not Triton's, may edit them
    and remove names that only it reads.
    """
    if not hasattr(fn, "arg_names"):
        raise InvalidValueError(f"tritile.autotune decorates {fn!r}: expected a kernel of triton.jit")
    arguments, function = list(fn.arg_names), layers_of(fn)[-1]
    kernel = getattr(function, "__name__", repr(fn))
    set_here = set_by(configs or [triton.Config({})])
    for inner in (layer for layer in layers_of(fn) if isinstance(layer, Autotuner)):
        if clash := ", ".join(sorted(set_here & set_by(getattr(inner, "space", None) or inner.configs))):
            text = "is autotuned already, and configs of both decorators set"
            raise InvalidValueError(f"{kernel} {text} {clash}: expected one autotuner, with all configs")

    def check_names(parameter: str, names: Any, offered: Sequence[str]) -> None:
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            text = f"{parameter} is {names!r}: expected a list of names of arguments of {kernel}"
            raise InvalidValueError(text)
        if unknown := ", ".join(repr(name) for name in names if name not in offered):
            hint = did_you_mean(next(name for name in names if name not in offered), offered)
            text = f"expected arguments of {kernel}, which are {', '.join(offered)}"
            raise InvalidValueError(f"{parameter} names {unknown}{hint}: {text}")

    check_names("key", key, [*arguments, *key] if isinstance(key, list | tuple) else arguments)
    if unknown := [name for name in key if name not in arguments]:
        named = ", ".join(map(repr, unknown)) + did_you_mean(unknown[0], arguments)
        text = f"key of {kernel} names {named}, which are not its arguments: ignored"
        warnings.warn(text, UserWarning, stacklevel=callers_level())
    constants = constants_of(function)
    for parameter, names in (("reset_to_zero", reset_to_zero), ("restore_value", restore_value)):
        check_names(parameter, names or [], [name for name in arguments if name not in constants])
    if isinstance(configs, Space):
        check_names("Space", [n for n in configs.parameters if n not in _options()], arguments)
    elif configs and is_whole and all(isinstance(layer, _LAYERS) for layer in layers_of(fn)[:-1]):
        names = {name: None for config in configs for name in config.kwargs}
        if inner := next((name for name in names if name in _TRITONS and name not in arguments), ""):
            text = f"has {inner} among arguments of the kernel, where it has no effect"
            raise InvalidValueError(
                f"triton.Config of {kernel} {text}: expected triton.Config({{...}}, {inner}=...)"
            )
        check_names("triton.Config", [n for n in names if n not in _options()], arguments)
    if reference is not None:
        check_reference(reference, fn, configs)
    if bucket is not None and not (isinstance(bucket, Mapping) and all(map(callable, bucket.values()))):
        raise InvalidValueError(f"bucket is {bucket!r}: expected functions by names of key, {list(key)}")
    if wrong := next((name for name in bucket or () if name not in key), ""):
        expected = f"expected names of key, {list(key)}"
        raise InvalidValueError(f"bucket of {kernel} names {wrong!r}{did_you_mean(wrong, key)}: {expected}")


def check_reference(reference: Any, fn: Any, configs: Any) -> None:
    """Raise InvalidValueError if a reference needs an argument that no caller of the kernel passes."""
    function, computed = layers_of(fn)[-1], _computed(fn, configs)
    kernel = getattr(function, "__name__", repr(fn))
    passed = [name for name in fn.arg_names if name not in computed]
    if not callable(reference):
        raise InvalidValueError(f"reference is {reference!r}: expected a function of arguments of {kernel}")
    try:
        signature = inspect.signature(reference)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind(**{name: None for name in passed if name in signature.parameters})
    except TypeError as error:
        rule = f"Callers give {', '.join(passed)}, each by name: others are tuned, or set by a heuristic"
        raise InvalidValueError(f"reference of {kernel}: {error}. {rule}") from error


def check_conflicts(
    function: Callable[..., Any], configs: Any, args: Sequence[Any], kwargs: Iterable[str]
) -> None:
    """Raise InvalidValueError if a call passes an argument or an option that configs set."""
    passed = {*list(inspect.signature(function).parameters)[: len(args)], *kwargs}
    if clash := ", ".join(sorted(set_by(configs) & passed)):
        text = "given, but configs set it: leave it out of the call, and out of an autotuner around this one"
        raise InvalidValueError(f"{function.__name__}: {clash} {text}")


def check_keywords(fn: Any, configs: Any, kwargs: Iterable[str], options: Iterable[str]) -> None:
    """Raise InvalidValueError for keyword arguments that a kernel does not have.

    `options`: the caller's own keyword arguments, one of which may be misspelt.
    """
    function, computed = layers_of(fn)[-1], _computed(fn, configs)
    accepted = [name for name in inspect.signature(function).parameters if name not in computed]
    offered = {*accepted, *computed, *_LAUNCHING, *_options()}
    if unknown := [name for name in kwargs if name not in offered]:
        hint = did_you_mean(unknown[0], [*accepted, *options]) or f": expected {', '.join(accepted)}"
        raise InvalidValueError(f"{function.__name__} has no argument {unknown[0]!r}{hint}")


def check_arguments(fn: Any, configs: Any, args: Sequence[Any], kwargs: Iterable[str]) -> None:
    """Raise InvalidValueError if a call's arguments do not fit a kernel with these configs.

    `kwargs` are names of keyword arguments. Triton's interpreter ignores unknown ones.
    """
    function, computed = layers_of(fn)[-1], _computed(fn, configs)
    signature = inspect.signature(function)
    check_keywords(fn, configs, kwargs := [*kwargs], ("grid", "device"))
    check_conflicts(function, configs, args, named := {*kwargs} - _LAUNCHING)
    try:
        signature.bind(*args, **dict.fromkeys((named - _options()) | (computed & {*signature.parameters})))
    except TypeError as error:
        expected = ", ".join(name for name in signature.parameters if name not in computed)
        raise InvalidValueError(f"{function.__name__}: {error}: expected {expected}") from None


def check_grid(caller: str, grid: Any) -> None:
    listed = isinstance(grid, tuple | list) and 0 < len(grid) <= 3
    if not callable(grid) and not (listed and all(isinstance(n, Integral) and int(n) >= 0 for n in grid)):
        got = "there is no grid" if grid is None else f"grid is {grid!r}"
        expected = "a tuple of one to three sizes, or a function that returns one, as kernel[grid] takes it"
        raise InvalidValueError(f"{caller}: {got}: expected grid=, {expected}")


# Tensors.


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument: itself, in tuples and lists, and behind descriptors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif type(value) in DESCRIPTORS:
        yield value.base


def dtypes_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and dtypes of the tensors in an argument, numbered in a tuple: "x.0", "x.1"."""
    if isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from dtypes_of(f"{name}.{place}", item)
    else:
        dtype = getattr(value.base if type(value) in DESCRIPTORS else value, "dtype", None)
        if dtype is not None:
            yield name, str(dtype).removeprefix("torch.")


# Names of values and configs.


def _code(code: CodeType) -> list[Any]:
    consts = [_code(item) if isinstance(item, CodeType) else described(item) for item in code.co_consts]
    return [code.co_code.hex(), consts, code.co_names]


def described(value: Any) -> str:
    """Return text that identifies a value, the same in every process for values that launch the same.

    A Python function, such as a hook, counts by its code, its defaults, and captured numbers and strings.
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) in DESCRIPTORS:
        return f"{described(value.base)} {list(value.shape)} by {list(value.block_shape)}"
    if isinstance(value, tl.constexpr):
        return f"constexpr({described(value.value)})"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(described, value))})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(described, value)))})"
    if isinstance(value, functools.partial):
        keywords = described(sorted(value.keywords.items()))
        return f"partial({described(value.func)}, {described(value.args)}, {keywords})"
    if isinstance(value, JITCallable):
        return f"{value.__qualname__}:{source_hash(value)}"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        captured = [item for item in cells if item is None or isinstance(item, int | float | str)]
        by_keyword = [described(sorted(value.__kwdefaults__.items()))] if value.__kwdefaults__ else []
        return str([_code(value.__code__), captured, described(value.__defaults__), *by_keyword])
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def described_benchmark(value: Any, depth: int = 8) -> str:
    """Return text that identifies a benchmark, the same in every process.

    A function counts by its code, its defaults, and captured functions, numbers and strings; an object by its
    class's `__call__` and its attributes that are numbers or strings. Collections do not count, as they may
    grow while it runs. `depth`: how many functions deep.
    """

    def parts(values: Iterable[Any]) -> str:
        return f"[{', '.join(described_benchmark(item, depth - 1) for item in values)}]"

    if depth > 0 and isinstance(value, functools.partial):
        named = sorted(value.keywords.items())
        return f"partial{parts([value.func, *value.args, *(item for pair in named for item in pair)])}"
    if depth > 0 and isinstance(value, MethodType):
        return f"{parts([value.__func__])} of {described_benchmark(value.__self__, depth - 1)}"
    if depth > 0 and isinstance(value, FunctionType):
        changed = {step.argval for step in dis.get_instructions(value) if step.opname == "STORE_DEREF"}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        captured = [cell.cell_contents for name, cell in cells if name not in changed and cell != CellType()]
        named = sorted((value.__kwdefaults__ or {}).items())
        read = [*captured, *(value.__defaults__ or ()), *(item for pair in named for item in pair)]
        return f"{_code(value.__code__)}{parts(read)}"
    if value is None or inspect.isbuiltin(value) or isinstance(value, int | float | str | type):
        return described(value)
    call = inspect.getattr_static(type(value), "__call__", None)
    attributes = getattr(value, "__dict__", {}).items()
    plain = sorted((name, item) for name, item in attributes if isinstance(item, int | float | str))
    code = parts([call]) if depth > 0 and isinstance(call, FunctionType) else ""
    return f"{type(value).__qualname__}{code} {plain}"


def stored(value: Any) -> int | float | bool | str | None:
    """Return a value of `key` for the store: numbers, strings and None as they are, anything else as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # numpy's, too
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return described(value)


def hashable(value: Any) -> Any:
    """Return a hashable stand-in for a value in a cache key, equal for equal values.

    NaN equals itself; a tensor counts by dtype and shape.
    """
    if value.__class__ is tuple and SCALARS.issuperset(map(type, value)):
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, tuple | list):
        return tuple(map(hashable, value))
    if isinstance(value, float) and value != value:
        return math.nan  # the same object, which a dictionary finds
    try:
        hash(value)
    except TypeError:
        return described(value)
    return value


def _plain(value: Any) -> int | float | bool | str:
    """Return a value for a `Config`: plain data as it is, anything else named by type and content."""
    kind = type(value)
    if kind is bool or (kind is int and abs(value) < _MAX_INT):
        return value
    if kind is float and math.isfinite(value) and (value or str(value) == "0.0"):
        return value
    if kind is str and len(value) <= _MAX_TEXT and value.isprintable() and not value.startswith("#"):
        return value
    text = described(value)
    name = f"#{kind.__name__}:{text}"
    if len(name) > _MAX_TEXT or not name.isprintable():
        name = f"#{kind.__name__[:40]}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name


def identity(config: triton.Config) -> Config:
    """Return a config's name in the store: equal for configs that launch the same, hooks included."""
    values = {name: _plain(value) for name, value in config.kwargs.items()}
    if config.pre_hook is not None:
        values["pre_hook"] = _plain(config.pre_hook)
    if config.ir_override is not None:
        file = Path(config.ir_override)
        values["ir_override"] = _plain(("ir", file.read_bytes() if file.is_file() else config.ir_override))
    options = config.num_warps, config.num_stages, config.num_ctas, config.maxnreg
    try:
        return Config(tuple(sorted(values.items())), *options)
    except InvalidValueError:  # names or options that no `Config` can have, for Triton to refuse
        return Config((("config", _plain((sorted(values.items()), options))),))


def identified(
    configs: Iterable[triton.Config], listed: Sequence[triton.Config] = ()
) -> dict[Config, triton.Config]:
    """Return configs by their names in the store, in order; of equal ones the first.

    Configs that differ in ways that no digest shows, such as two hooks with the same code, are numbered by
    their order in `listed`, the list from which `configs` were chosen.
    """
    result: dict[Config, triton.Config] = {}
    namesakes: dict[Config, list[triton.Config]] = {}
    for place, config in enumerate((*listed, *configs)):
        name = identity(config)
        others = namesakes.setdefault(name, [])
        number = next((n for n, other in enumerate(others) if _is_same(config, other)), len(others))
        if number == len(others):
            others.append(config)
        if number:
            name = name.derived(sorted((*name.kwargs, ("number", number + 1))))
        if place >= len(listed):
            result.setdefault(name, config)
    return result


def _is_same(a: triton.Config, b: triton.Config) -> bool:
    """True if two configs of the same name are the same: no digest hides a difference."""
    pairs = ((value, b.kwargs[name]) for name, value in a.kwargs.items())
    return a.pre_hook is b.pre_hook and all(v is w or type(v) in SCALARS or v == w for v, w in pairs)
