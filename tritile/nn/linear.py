"""`tritile.nn.Linear`: torch's linear layer, multiplied by `tritile.linear`."""

from typing import Any, NoReturn

import torch

from tritile.core.epilogue import Activation
from tritile.errors import UnsupportedError
from tritile.ops.checks import check_activation
from tritile.ops.fused import linear


def refuse_scripting(layer: torch.nn.Module) -> NoReturn:
    """Raise UnsupportedError: `torch.jit.script` calls this as `__prepare_scriptable__` of a layer."""
    raise UnsupportedError(
        f"torch.jit.script cannot compile {type(layer).__qualname__} of tritile: use torch.compile, "
        "torch.export or torch.jit.trace, or restore exchanged layers first with tritile.nn.restore(model)"
    )


class Linear(torch.nn.Linear):
    """A subclass of `torch.nn.Linear` that multiplies with `tritile.linear`.

    Parameters, initialization and state dict are those of `torch.nn.Linear`. `ColwiseParallel` and
    `RowwiseParallel` of `torch.distributed.tensor.parallel` shard it like torch's.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, the last dimension of the result.
        bias: True adds a bias (N,).
        device: device of the parameters.
        dtype: dtype of the parameters and the input: float16, bfloat16, float32, float64, complex64 or
            complex128.
        activation: applied before the result is stored, for real dtypes only: "relu", "gelu", "gelu_tanh",
            "silu", or None.

    A call raises the same errors as `tritile.linear`.

    Raises:
        InvalidValueError: the activation is unknown.

    Examples:
        >>> layer = tritile.nn.Linear(64, 256, device="cuda", activation="gelu")
        >>> layer(torch.randn(10, 64, device="cuda")).shape
        torch.Size([10, 256])
    """

    activation: Activation | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
    ) -> None:
        check_activation("nn.Linear", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return activation(input @ weight^T + bias), (..., N), for an input (..., K)."""
        return linear(input, self.weight, self.bias, activation=self.activation)

    __prepare_scriptable__ = refuse_scripting

    def _get_name(self) -> str:
        return "tritile.nn.Linear" if type(self) is Linear else super()._get_name()

    def extra_repr(self) -> str:
        """Return the sizes, and the activation if there is one."""
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return super().extra_repr() + activation
