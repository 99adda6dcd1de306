"""Register tritile's kernels at aten's operators while an override is on.

Where no override is on in a thread, or a call is passed through, they call the kernel that was registered
before, so that the answer is torch's own. They lie below autograd, autocast and vmap, which stay torch's. The
kernels in Python decide about calls. Above them lie those of the C++ dispatch library, where there is one
(`in_torch.crossing`), which handle or pass through the calls that are decided already.
"""

import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.library import Library, get_kernel

from tritile.core.forgetting import also_forgets
from tritile.core.of_torch import destroy, forget_dispatches, untraced
from tritile.core.settings import environment_is_silent
from tritile.core.threads import at_fork
from tritile.in_torch import building, routes
from tritile.in_torch.crossing import Crossing
from tritile.in_torch.state import active, in_its_mode, tally_everywhere

PRODUCTS: Final = ("mm", "bmm", "addmm", "baddbmm")

_lock = threading.RLock()  # reentrant: a collected generator leaves its override at any point
at_fork(_lock)
_wanted: Counter[str] = Counter()  # the number of open overrides that want kernels at a key
_libraries: dict[str, "_Registered"] = {}

Kernel = Callable[..., Any]


def _learner(crossing: Crossing | None) -> routes.Learn | None:
    """Return what records the current decision in C++, None where Python decides every time."""
    # The environment may have changed since the override was turned on, and C++ does not read it.
    if crossing is None or not environment_is_silent() or not crossing.waits:
        return None
    return crossing.learn


def _product(name: str, original: Kernel, crossing: Crossing | None) -> Kernel:
    @untraced
    def kernel(keys: Any, *tensors: torch.Tensor, **options: Any) -> Any:
        entry = active()
        if entry is not None:
            with in_its_mode(entry):
                learn = _learner(crossing)
                brief = not learn and routes.brief_product(name, entry, tensors)
                result = None if brief else routes.product(name, entry, tensors, options, learn)
            if result is not None:
                return result
        return original(keys, *tensors, **options)

    return kernel


def _copy(original: Kernel, crossing: Crossing | None) -> Kernel:
    @untraced
    def kernel(keys: Any, x: torch.Tensor, **options: Any) -> Any:
        form = options.get("memory_format")
        if form is not None and form is not torch.preserve_format:  # others keep the order of dimensions
            entry = active()
            if entry is not None:
                with in_its_mode(entry):
                    learn = _learner(crossing)
                    result = None if routes.brief_copy(entry, x) else routes.copy(entry, x, form, learn)
                if result is not None:
                    return result
        return original(keys, x, **options)

    return kernel


class _Registered(NamedTuple):
    """Hold what is registered at a dispatch key: kernels in Python, and those in C++ above them, if any."""

    library: Library
    crossing: Crossing | None = None
    uncross: Callable[[], object] = lambda: None

    def remove(self) -> None:
        self.uncross()
        destroy(self.library)


def _register(key: str) -> _Registered:
    library = Library("aten", "IMPL")
    if key == "CUDA" and not torch.backends.cuda.is_built():
        return _Registered(library)  # no kernels to override
    crossing = building.library()
    before = 0 if crossing is None else crossing.before(key)
    kernels: dict[str, Callable[[Kernel, Crossing | None], Kernel]] = {"clone": _copy}
    for name in PRODUCTS:
        kernels[name] = kernels[f"{name}.out"] = functools.partial(_product, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for name, made in kernels.items():
            original = get_kernel(f"aten::{name}", key).call_boxed
            library.impl(name, made(original, crossing), key, with_keyset=True)
    if crossing is None:
        return _Registered(library)
    crossing.limit(routes.FEW_ROWS, routes.SMALL, routes.LITTLE)
    crossing.everywhere(tally_everywhere())
    also_forgets(crossing.forget)
    # At exit torch removes the library's kernels. Those above them, which are newer, must go first.
    uncross = weakref.finalize(library, crossing.uncross, before)
    crossing.cross(before)
    return _Registered(library, crossing, uncross)


def _forget_dispatches() -> None:
    """Make torch's tracing look up kernels anew: torch 2.11 crashes on those that are gone."""
    for name in ("clone", *PRODUCTS):
        packet = getattr(torch.ops.aten, name)
        for overload in (packet.default, *([packet.out] if name in PRODUCTS else [])):
            forget_dispatches(overload)


def install(keys: Iterable[str]) -> None:
    """Register kernels at these dispatch keys ("CUDA", "CPU"), until `uninstall` was called as often."""
    with _lock:
        for key in keys:
            if key not in _libraries:
                _libraries[key] = _register(key)
                _forget_dispatches()
            _wanted[key] += 1


def tell_everywhere() -> None:
    """Tell the kernels about the current override of all threads."""
    with _lock:
        for registered in _libraries.values():
            if registered.crossing is not None:
                registered.crossing.everywhere(tally_everywhere())


def uninstall(keys: Iterable[str]) -> None:
    """Restore the operators' own kernels, once no other override needs ours.

    Kernels in C++ stay, with Python's below them: they cost next to nothing, and another thread may be in
    them.
    """
    with _lock:
        for key in keys:
            _wanted[key] -= 1
            if _wanted[key] == 0 and _libraries[key].crossing is None:
                _remove(key)


def _remove(key: str) -> None:
    _libraries.pop(key).remove()
    _forget_dispatches()


def remove_unwanted() -> None:
    """Remove all kernels that stayed. No other thread may be multiplying."""
    with _lock:
        for key in [key for key in _libraries if not _wanted[key]]:
            _remove(key)
