"""Forms of calls: what tells one call of a tuned kernel from another, found in about a microsecond."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

# Types whose values never change. An equal value of another may not mean what it meant.
_FROZEN: Final = (int, float, bool, str, type(None), torch.dtype, tl.dtype)

DESCRIPTORS: Final = (TensorDescriptor, GluonDescriptor)  # whose dtype is that of their tensor

Form = tuple[Any, ...]


class Forms:
    """Forms of calls of one kernel: calls of one form pose one problem, on one GPU, in one mode.

    A form is a tuple to look up in a dictionary: the mode, the GPU's number, which arguments are given,
    their dtypes, and the values of those in `keys`.
    """

    def __init__(self, arg_names: Sequence[str], keys: Sequence[str]) -> None:
        self._keys = [(name, place) for place, name in enumerate(arg_names) if name in keys]
        self._lead = 0  # where the last call that was kept has its first tensor on a GPU

    def of(self, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        """The form of a call; None where a look at one argument does not show it to run on a GPU."""
        values = (*args, *kwargs.values())
        lead = values[self._lead] if self._lead < len(values) else None
        if not (isinstance(lead, torch.Tensor) and lead.is_cuda):
            return None
        given = len(args)
        return (
            mode,
            lead.get_device(),
            given,
            *kwargs,
            *[v.base.dtype if type(v) in DESCRIPTORS else getattr(v, "dtype", None) for v in values],
            *[args[place] if place < given else kwargs.get(name) for name, place in self._keys],
        )

    def lasting(self, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        """The form of a call, to keep; None where it is not on a GPU, or a value of a key may change."""
        values = (*args, *kwargs.values())
        tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.is_cuda]
        self._lead = tensors[0] if tensors else 0
        form = self.of(mode, args, kwargs)
        # What does not equal itself, as NaN, would be kept anew at each call.
        return form if form and all(type(part) in _FROZEN and part == part for part in form) else None
