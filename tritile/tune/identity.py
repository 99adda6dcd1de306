"""Names of configs and of key values, by what they launch: text and numbers that a store can hold.

Types count: A=1, A=True and A=1.0 compile three kernels. Values that are no plain data (dtypes, tuples,
functions, hooks) are named by their type and a digest of their content, the same in every process.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritile.core.config import Config
from tritile.core.of_triton import JITCallable
from tritile.core.source import source_hash
from tritile.errors import InvalidValueError

DESCRIPTORS: Final = (TensorDescriptor, GluonDescriptor)  # whose dtype is that of their tensor
_SCALARS: Final = frozenset({int, bool, str, type(None)})  # hashable, equal to themselves
_MAX_TEXT: Final = 64  # characters of a value in a `Config`
_MAX_INT: Final = 2**31


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument: itself, those in tuples and lists, and those behind descriptors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif type(value) in DESCRIPTORS:
        yield value.base


def dtypes_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and dtypes of the tensors of an argument; those of a tuple are numbered: "x.0", "x.1"."""
    if isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from dtypes_of(f"{name}.{place}", item)
    else:
        dtype = getattr(value.base if type(value) in DESCRIPTORS else value, "dtype", None)
        if dtype is not None:
            yield name, str(dtype).removeprefix("torch.")


def described(value: Any) -> str:
    """Return text that says what a value is, the same in every process for values that launch the same."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tl.constexpr):
        return f"constexpr({described(value.value)})"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(described, value))})"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(f'{k!r}: {described(v)}' for k, v in value.items())})"
    if isinstance(value, functools.partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(value.keywords)})"
    if isinstance(value, JITCallable) or hasattr(value, "__code__"):
        return f"{getattr(value, '__qualname__', '')}:{source_hash(value)}"
    if hasattr(value, "__func__"):  # a method
        return f"{described(value.__func__)} of {type(value.__self__).__qualname__}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _plain(value: Any) -> int | float | bool | str:
    """Return a value as a `Config` holds it: plain data as it is, anything else named by type and content."""
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
    """Return the name of a config in a store: equal for configs that launch the same, hooks included."""
    values = {name: _plain(value) for name, value in config.kwargs.items()}
    if config.pre_hook is not None:
        values["pre_hook"] = _plain(config.pre_hook)
    override = getattr(config, "ir_override", None)
    if override is not None:
        file = Path(override)
        values["ir_override"] = _plain(("ir", file.read_bytes() if file.is_file() else override))
    options = config.num_warps, config.num_stages, config.num_ctas, config.maxnreg
    try:
        return Config(tuple(sorted(values.items())), *options)
    except InvalidValueError:  # of names or options that no `Config` holds: Triton is to refuse them
        return Config((("config", _plain((sorted(values.items()), options))),))


def _same(a: triton.Config, b: triton.Config) -> bool:
    """True if two configs of one identity are the same, and no digest has hidden a difference."""
    return a.pre_hook is b.pre_hook and all(
        v is b.kwargs[name] or not hasattr(v, "__dict__") for name, v in a.kwargs.items()
    )


def identified(configs: Iterable[triton.Config]) -> dict[Config, triton.Config]:
    """Return configs by their identities, in order; of equal ones the first.

    Configs that differ where no digest can tell (two hooks of one code) get numbers, by their order.
    """
    found: dict[Config, triton.Config] = {}
    for config in configs:
        own, number = identity(config), 1
        name = own
        while name in found and not _same(found[name], config):
            number += 1
            name = own.derived((*own.kwargs, ("number", number)))
        found.setdefault(name, config)
    return found


def key_part(value: Any) -> Any:
    """Return a value of a call's key as something that can be hashed, equal for equal values.

    NaN equals itself; a tensor counts by dtype and shape.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, tuple | list):
        return tuple(value) if _SCALARS.issuperset(map(type, value)) else tuple(map(key_part, value))
    if isinstance(value, float) and value != value:
        return math.nan  # one object, which a dictionary finds
    try:
        hash(value)
    except TypeError:
        return described(value)
    return value


def stored(value: Any) -> int | float | bool | str | None:
    """Return a value of a call's key as JSON holds it: numbers, words and None; anything else as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # numpy's, too
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return described(value)
