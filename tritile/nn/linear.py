"""`tritile.nn.Linear`: torch's linear layer, multiplied by `tritile.linear`."""

from typing import Any

import torch

from tritile.ops.fused import check_activation, linear


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` by `tritile.linear`: the same parameters, state dict and initialisation.

    As a subclass of torch's it is sharded by `ColwiseParallel` and `RowwiseParallel` of
    `torch.distributed.tensor.parallel`, as torch's is.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, that of the result.
        bias: whether there is one, (N,).
        device: of the parameters.
        dtype: of the parameters, and of the input: float16, bfloat16, float32, float64, complex64 or
            complex128.
        activation: done as the product is stored: "relu", "gelu", "gelu_tanh", "silu", or None; of real
            numbers alone.

    Raises InvalidValueError for an activation that is none. A call raises as `tritile.linear` does.
    """

    activation: str | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        check_activation("nn.Linear", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """activation(input @ weight^T + bias), (..., N) of an input (..., K)."""
        return linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        """Sizes, and the activation if there is one."""
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return super().extra_repr() + activation
