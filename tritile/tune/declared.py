"""Checks of the arguments of `tritile.autotune`, made as it decorates a kernel, and of those of a call."""

import dataclasses
import inspect
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

import triton

from tritile.core.of_triton import InterpretedFunction, backends
from tritile.core.settings import MODES
from tritile.errors import InvalidValueError, callers_level
from tritile.tune.search import Space

_LAUNCHING: Final = {"grid", "warmup"}  # keyword arguments of a launch
_TRITONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # options that every backend takes


def check_options(
    configs: Any, prune_configs_by: Any, mode: str | None, reference: Any, tolerance: Any, **deprecated: Any
) -> None:
    """Raise InvalidValueError for options of `autotune` that no kernel takes; warn of deprecated ones."""
    if mode is not None and mode not in MODES:
        raise InvalidValueError(f"mode is {mode!r}: wanted one of {', '.join(MODES)}, or None")
    if isinstance(configs, Space) and prune_configs_by:
        raise InvalidValueError("prune_configs_by is for a list of configs: a Space has `where`")
    listed = isinstance(configs, list | tuple) and all(isinstance(c, triton.Config) for c in configs)
    if not (configs is None or listed or isinstance(configs, Space)):
        raise InvalidValueError(f"configs is {configs!r}: wanted a list of triton.Config, or a tritile.Space")
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 <= tolerance < math.inf):
        raise InvalidValueError(f"tolerance is {tolerance!r}: wanted a relative error, 0 or above")
    if tolerance is not None and reference is None:
        raise InvalidValueError("tolerance without a reference: there is no answer to compare with")
    if given := ", ".join(name for name, value in deprecated.items() if value):
        text = f"{given}: deprecated in triton.autotune, and without effect in tritile.autotune"
        text += ": do_bench= sets another timing"
        warnings.warn(text, DeprecationWarning, stacklevel=callers_level())


def _options() -> set[str]:
    """Return what a config may set besides arguments of its kernel: the options of Triton's backends."""
    modules = [sys.modules[backend.compiler.__module__] for backend in backends.values()]
    kinds = [kind for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    return {field.name for kind in kinds for field in dataclasses.fields(kind)} | {*_TRITONS}


def layers_of(fn: Any) -> list[Any]:
    """Return a kernel's layers from the outside in: heuristics, the jitted kernel, its Python function."""
    found = [fn]
    while not inspect.isfunction(found[-1]) and hasattr(found[-1], "fn"):
        found.append(found[-1].fn)
    return found


def constants_of(fn: Any) -> set[str]:
    layers = layers_of(fn)
    found = {p.name for layer in layers for p in getattr(layer, "params", ()) if p.is_constexpr}
    # An interpreted function has no parameters; annotations are types, or text that names them.
    interpreted = [layer.fn.__annotations__ for layer in layers if isinstance(layer, InterpretedFunction)]
    return found.union(
        name for kinds in interpreted for name, kind in kinds.items() if "constexpr" in str(kind)
    )


def set_by(configs: Any) -> set[str]:
    if isinstance(configs, Space):
        return {*configs.parameters, *triton.Config({}).all_kwargs()}
    return {name for config in configs or () for name in config.all_kwargs()}


def _computed(layers: list[Any], configs: Any) -> set[str]:
    """Return names of arguments that no caller gives: configs set them, or heuristics do."""
    return set_by(configs).union(*(getattr(layer, "values", ()) for layer in layers))


def check_arguments(fn: Any, configs: Any, args: Sequence[Any], kwargs: Iterable[str]) -> None:
    """Raise InvalidValueError where a call's arguments do not fit a kernel that is run with these configs.

    `kwargs` are names of keyword arguments. Triton's interpreter leaves out those that it does not know.
    """
    layers = layers_of(fn)
    signature, computed = inspect.signature(layers[-1]), _computed(layers, configs)
    placed, named = list(signature.parameters)[: len(args)], {*kwargs} - _LAUNCHING
    try:
        if clash := sorted(set_by(configs) & {*placed, *named}):
            raise TypeError(f"{', '.join(clash)} given, but configs set it")
        signature.bind(
            *args, **dict.fromkeys((named - _options()) | (computed & signature.parameters.keys()))
        )
    except TypeError as error:
        wanted = ", ".join(name for name in signature.parameters if name not in computed)
        raise InvalidValueError(f"{layers[-1].__name__}: {error}: wanted {wanted}") from None


def check_grid(who: str, grid: Any) -> None:
    listed = isinstance(grid, tuple | list) and 0 < len(grid) <= 3
    if not callable(grid) and not (listed and all(isinstance(n, Integral) and int(n) >= 0 for n in grid)):
        came = "there is no grid" if grid is None else f"grid is {grid!r}"
        wanted = "a tuple of one to three sizes, or a function that returns one, as kernel[grid] takes it"
        raise InvalidValueError(f"{who}: {came}: wanted grid=, {wanted}")


def _checked_names(parameter: str, names: Any, offered: Iterable[str], kernel: str) -> None:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidValueError(f"{parameter} is {names!r}: wanted a list of names of arguments of {kernel}")
    if unknown := ", ".join(repr(name) for name in names if name not in offered):
        text = f"wanted arguments of {kernel}, which are {', '.join(offered)}"
        raise InvalidValueError(f"{parameter} names {unknown}: {text}")


def _check_reference(reference: Any, given: Iterable[str], kernel: str) -> None:
    """Raise InvalidValueError where a reference asks for an argument that no caller of the kernel gives."""
    if not callable(reference):
        raise InvalidValueError(f"reference is {reference!r}: wanted a function of arguments of {kernel}")
    try:
        signature = inspect.signature(reference)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind(**{name: None for name in given if name in signature.parameters})
    except TypeError as error:
        who = f"Callers give {', '.join(given)}, each by name: others are tuned, or set by a heuristic"
        raise InvalidValueError(f"reference of {kernel}: {error}. {who}") from error


def check_kernel(
    fn: Any, configs: Any, key: Any, reset_to_zero: Any, restore_value: Any, reference: Any,
    bucket: Any = None,
) -> None:  # fmt: skip
    """Raise InvalidValueError, naming parameter and kernel, where an argument does not fit the kernel."""
    if not hasattr(fn, "arg_names"):
        raise InvalidValueError(f"tritile.autotune decorates {fn!r}: wanted a kernel of triton.jit")
    layers, arguments = layers_of(fn), list(fn.arg_names)
    kernel = getattr(layers[-1], "__name__", repr(fn))
    _checked_names("key", key, [*arguments, *key] if isinstance(key, list | tuple) else arguments, kernel)
    unknown = [name for name in key if name not in arguments]
    if unknown:
        text = f"key of {kernel} names {', '.join(map(repr, unknown))}, which are no arguments: left out"
        warnings.warn(text, UserWarning, stacklevel=callers_level())
    for parameter, names in (("reset_to_zero", reset_to_zero), ("restore_value", restore_value)):
        if names:
            _checked_names(parameter, names, [n for n in arguments if n not in constants_of(fn)], kernel)
    if isinstance(configs, Space):
        names = [name for name in configs.parameters if name not in _options()]
        _checked_names("Space", names, arguments, kernel)
    if reference is not None:
        computed = _computed(layers, configs)
        _check_reference(reference, [name for name in arguments if name not in computed], kernel)
    if bucket is not None:
        fits = isinstance(bucket, Mapping) and all(n in key and callable(f) for n, f in bucket.items())
        if not fits:
            raise InvalidValueError(f"bucket is {bucket!r}: wanted functions by names of key, {list(key)}")
