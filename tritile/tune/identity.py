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
from types import CellType, CodeType, FunctionType
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


def zero(named: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        for tensor in tensors_of(named.get(name)):
            tensor.zero_()


def dtypes_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and dtypes of the tensors of an argument; those of a tuple are numbered: "x.0", "x.1"."""
    if isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from dtypes_of(f"{name}.{place}", item)
    else:
        dtype = getattr(value.base if type(value) in DESCRIPTORS else value, "dtype", None)
        if dtype is not None:
            yield name, str(dtype).removeprefix("torch.")


def _code(code: CodeType) -> list[Any]:
    consts = [_code(each) if isinstance(each, CodeType) else described(each) for each in code.co_consts]
    return [code.co_code.hex(), consts, code.co_names]


def described(value: Any) -> str:
    """Return text that says what a value is, the same in every process for values that launch the same.

    A Python function, as a hook, counts by its code, its defaults, and the numbers and words it captured.
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) in DESCRIPTORS:
        return f"{described(value.base)} {list(value.shape)} by {list(value.block_shape)}"
    if isinstance(value, tl.constexpr):
        return f"constexpr({described(value.value)})"
    if isinstance(value, tuple | list | set | frozenset):
        items = [described(each) for each in value]
        items = sorted(items) if isinstance(value, set | frozenset) else items
        return f"{type(value).__name__}({', '.join(items)})"
    if isinstance(value, functools.partial):
        return f"partial({described(value.func)}, {described(value.args)}, {sorted(value.keywords.items())})"
    if isinstance(value, JITCallable):
        return f"{value.__qualname__}:{source_hash(value)}"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        captured = [each for each in cells if type(each) in _SCALARS or isinstance(each, float)]
        return str([_code(value.__code__), captured, described(value.__defaults__)])
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


def identified(
    configs: Iterable[triton.Config], listed: Iterable[triton.Config] = ()
) -> dict[Config, triton.Config]:
    """Return configs by their identities, in order; of equal ones the first.

    Configs that differ where no digest can tell (two hooks of one code) get numbers, by their order in
    `listed`, the list that `configs` were chosen from.
    """
    found: dict[Config, triton.Config] = {}
    numbers: dict[Config, list[triton.Config]] = {}
    for config in (*listed, *configs):
        alike = numbers.setdefault(identity(config), [])
        if not any(_equal(config, other) for other in alike):
            alike.append(config)
    for config in configs:
        own = identity(config)
        number = next(place for place, other in enumerate(numbers[own], 1) if _equal(config, other))
        if number > 1:
            own = own.derived(sorted((*own.kwargs, ("number", number))))
        found.setdefault(own, config)
    return found


def _equal(a: triton.Config, b: triton.Config) -> bool:
    """True if two configs of one identity are the same: no digest has hidden a difference."""
    pairs = ((value, b.kwargs[name]) for name, value in a.kwargs.items())
    return a.pre_hook is b.pre_hook and all(v is w or type(v) in _SCALARS or v == w for v, w in pairs)


def key_part(value: Any) -> Any:
    """Return a value of a call's key as something that can be hashed, equal for equal values.

    NaN equals itself; a tensor counts by dtype and shape.
    """
    if value.__class__ is tuple and _SCALARS.issuperset(map(type, value)):
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, tuple | list):
        return tuple(map(key_part, value))
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
