"""Share what layers with packed weights need: sizes, a bias, and buffers that keep their dtypes."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tritile.core.of_torch import Moved
from tritile.errors import ShapeError


class PackedLinear(Moved):
    """Hold the weight of a linear layer in buffers, which are not trained.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, the last dimension of the result.
        bias: add a bias (N,), a parameter.
        device: device of the bias.
        dtype: dtype of the bias.

    Raises:
        ShapeError: the weight would have no elements.
    """

    # Dtypes that `.to(dtype)`, which casts every floating tensor, may give to these buffers.
    _types: ClassVar[dict[str, tuple[torch.dtype, ...]]]

    def __init__(
        self, in_features: int, out_features: int, bias: bool, device: Any, dtype: torch.dtype
    ) -> None:
        if in_features < 1 or out_features < 1:
            sizes = f"in_features is {in_features} and out_features {out_features}"
            raise ShapeError(f"{type(self).__name__}: {sizes}: wanted 1 or more")
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        given = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if given is None else torch.nn.Parameter(given)

    def _moved(self, tensors: Callable[[], Any]) -> None:
        before = {name: getattr(self, name) for name in self._types}
        super()._moved(tensors)
        for name, types in self._types.items():
            old, new = before[name], getattr(self, name)
            if old is not None and new is not None and new.dtype not in types:
                setattr(self, name, old.to(new.device))

    def extra_repr(self) -> str:
        """Return the sizes, and whether there is a bias."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
