"""What layers share whose weight has few bits: sizes, a bias, and buffers that keep their types."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tritile.core.of_torch import Moved
from tritile.errors import ShapeError


class PackedLinear(Moved):
    """A linear layer whose weight lies in buffers, which training leaves alone.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, that of the result.
        bias: whether there is one, a parameter (N,).
        device: of the bias.
        dtype: of the bias.

    Raises ShapeError for a weight without elements.
    """

    # Buffers, and the types that `.to(dtype)`, which takes all that float along, may give them.
    _types: ClassVar[dict[str, tuple[torch.dtype, ...]]]

    def __init__(
        self, in_features: int, out_features: int, bias: bool, device: Any, dtype: torch.dtype
    ) -> None:
        if in_features < 1 or out_features < 1:
            shape = (out_features, in_features)
            raise ShapeError(f"{type(self).__name__}: a weight of {shape}: wanted sizes of 1 and more")
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
        """Sizes, and whether there is a bias."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
