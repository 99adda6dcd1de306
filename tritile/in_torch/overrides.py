"""Kernels of ours at aten's operators, while any switch is on.

Where no switch is on in a thread, or a call is left, they call the kernel that was there before, whose
answer is torch's own. They lie below autograd, autocast, vmap and the rest, which are torch's as ever.
Those in Python decide; above them stand those in C++, where there are any (`in_torch.crossing`), which
let pass what needs no decision.
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
from tritile.core.of_torch import destroy, forget_dispatches
from tritile.core.settings import environment_is_silent
from tritile.core.threads import at_fork
from tritile.in_torch import building, routes
from tritile.in_torch.crossing import Crossing
from tritile.in_torch.state import active, in_its_mode, tally_everywhere
from tritile.in_torch.untraced import untraced

PRODUCTS: Final = ("mm", "bmm", "addmm", "baddbmm")

_lock = threading.RLock()  # a generator that is collected leaves its switch, wherever that may be
at_fork(_lock)
_wanted: Counter[str] = Counter()  # how many switches that are on want kernels at a key
_libraries: dict[str, "_Stood"] = {}

Kernel = Callable[..., Any]


def _learner(crossing: Crossing | None) -> routes.Learn | None:
    """Whom to tell what becomes of the call that is being decided, None where it goes by Python again."""
    # What the environment says may have changed since the switch was turned on: C++ does not ask it.
    if crossing is None or not environment_is_silent() or not crossing.waits:
        return None
    return crossing.learn


def _product(name: str, original: Kernel, crossing: Crossing | None) -> Kernel:
    @untraced
    def kernel(keys: Any, *tensors: torch.Tensor, **words: Any) -> Any:
        entry = active()
        if entry is not None:
            with in_its_mode(entry):
                learn = _learner(crossing)
                brief = not learn and routes.brief_product(name, entry, tensors)
                result = None if brief else routes.product(name, entry, tensors, words, learn)
            if result is not None:
                return result
        return original(keys, *tensors, **words)

    return kernel


def _copy(original: Kernel, crossing: Crossing | None) -> Kernel:
    @untraced
    def kernel(keys: Any, x: torch.Tensor, **words: Any) -> Any:
        form = words.get("memory_format")
        if form is not None and form is not torch.preserve_format:  # others keep the order of dimensions
            entry = active()
            if entry is not None:
                with in_its_mode(entry):
                    learn = _learner(crossing)
                    result = None if routes.brief_copy(entry, x) else routes.copy(entry, x, form, learn)
                if result is not None:
                    return result
        return original(keys, x, **words)

    return kernel


class _Stood(NamedTuple):
    """What stands at a dispatch key: kernels in Python, and those in C++ above them, if there are any."""

    library: Library
    crossing: Crossing | None = None
    uncross: Callable[[], object] = lambda: None

    def remove(self) -> None:
        self.uncross()
        destroy(self.library)


def _registered(key: str) -> _Stood:
    library = Library("aten", "IMPL")
    if key == "CUDA" and not torch.backends.cuda.is_built():
        return _Stood(library)  # nothing that could be called
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
        return _Stood(library)
    crossing.limit(routes.FEW_ROWS, routes.SMALL, routes.LITTLE)
    crossing.everywhere(tally_everywhere())
    also_forgets(crossing.forget)
    # At exit torch takes the library's kernels away: those above them go before, as what is newer does.
    uncross = weakref.finalize(library, crossing.uncross, before)
    crossing.cross(before)
    return _Stood(library, crossing, uncross)


def _forget_dispatches() -> None:
    """Have torch's tracing look up kernels anew: what it found while others were there crashes torch 2.11."""
    for name in ("clone", *PRODUCTS):
        packet = getattr(torch.ops.aten, name)
        for overload in (packet.default, *([packet.out] if name in PRODUCTS else [])):
            forget_dispatches(overload)


def install(keys: Iterable[str]) -> None:
    """Have kernels at these dispatch keys ("CUDA", "CPU") until `uninstall` was called as often."""
    with _lock:
        for key in keys:
            if key not in _libraries:
                _libraries[key] = _registered(key)
                _forget_dispatches()
            _wanted[key] += 1


def tell_everywhere() -> None:
    """Have the kernels know of the switch of all threads as it is now."""
    with _lock:
        for stood in _libraries.values():
            if stood.crossing is not None:
                stood.crossing.everywhere(tally_everywhere())


def uninstall(keys: Iterable[str]) -> None:
    """Give the operators back what was there, once nothing else wants the kernels.

    Those in C++ stay, with Python's below them: they cost next to nothing, and another thread may be in them.
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
    """Take away all kernels that stayed. No other thread may be multiplying."""
    with _lock:
        for key in [key for key in _libraries if not _wanted[key]]:
            _remove(key)
