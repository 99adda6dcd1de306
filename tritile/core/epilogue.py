"""Describe epilogues: what is done to the sums of a product before they are stored. Apply them by torch."""

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F

from tritile.errors import InvalidValueError

# How an operand varies over the result: not at all, by columns (it is one row), by rows, by both.
SPREADS: Final = ("one", "row", "column", "full")
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)
SIDES: Final = ("scale_a", "scale_b", "bias", "residual", "bias_up")  # operands in the order of kernels
_FLAGS: Final = ("weighted", "gated")


@dataclass(frozen=True, repr=False)
class Epilogue:
    """Describe activation(alpha * scale_a * scale_b * a @ b + beta * bias) + residual.

    With `gated` it is activation(...) * (a @ up + bias_up) + residual, for a second matrix `up` of the size
    of b.

    - Each operand says how it is spread over the result (see SPREADS), "" if there is none.
    - `activation` is one of ACTIVATIONS or "".
    - `weighted`: it has alpha and beta.

    It is false if nothing is to be done. In files, on command lines and in messages it is the text that
    `str` returns and `parse` reads, which lists what there is: "scale_a=column scale_b=row bias=row gelu".
    Raises InvalidValueError if a field is out of its range.
    """

    scale_a: str = ""
    scale_b: str = ""
    bias: str = ""
    residual: str = ""
    activation: str = ""
    weighted: bool = False
    bias_up: str = ""
    gated: bool = False

    def __post_init__(self) -> None:
        good = all(getattr(self, name) in ("", *SPREADS) for name in SIDES)
        good = good and isinstance(self.weighted, bool) and isinstance(self.gated, bool)
        if not good or self.activation not in ("", *ACTIVATIONS):
            raise InvalidValueError(
                f"{self!r}: expected spreads among {', '.join(SPREADS)}, "
                f"and an activation among {', '.join(ACTIVATIONS)}"
            )
        if self.bias_up and not self.gated:
            raise InvalidValueError(f"{self!r}: expected bias_up only if gated")

    def __str__(self) -> str:
        sides = [f"{name}={getattr(self, name)}" for name in SIDES if getattr(self, name)]
        return " ".join([*sides, *(name for name in _FLAGS if getattr(self, name)), self.activation]).strip()

    def __repr__(self) -> str:
        return f"Epilogue.parse({str(self)!r})"

    def __bool__(self) -> bool:
        return self != BARE

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> "Epilogue":
        """Return the epilogue that `str` wrote. Raises InvalidValueError for anything else."""
        found: dict[str, str | bool] = {}
        for word in text.split(" ") if text else []:
            name, _, spread = word.partition("=")
            if spread and name in SIDES:
                found[name] = spread
            elif word in _FLAGS:
                found[word] = True
            else:
                found["activation"] = word
        epilogue = cls(**found)  # type: ignore[arg-type]
        if str(epilogue) != text:
            raise InvalidValueError(f"epilogue {text!r}: expected {str(epilogue)!r}")
        return epilogue

    @property
    def constants(self) -> tuple[str | bool, ...] | None:
        """The fields in order, for which kernels are compiled; None if nothing is to be done."""
        return astuple(self) if self else None


BARE: Final = Epilogue()


# --- By torch: where no kernel runs, and as a reference ---


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of ACTIVATIONS, or nothing for ""."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return {"": lambda y: y, "relu": F.relu, "silu": F.silu}[activation](x)


def apply_epilogue(
    sums: torch.Tensor,
    sides: Sequence[torch.Tensor | None],
    activation: str = "",
    alpha: float = 1.0,
    beta: float = 1.0,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return activation(alpha * scale_a * scale_b * sums + beta * bias) * (up + bias_up) + residual.

    The result has the dtype of `sums` if that is float64, else float32. `sides` broadcast to the
    shape of `sums` and come in the order of SIDES. `up`: sums by the second matrix of a gated product.
    """
    kind = sums.dtype if sums.dtype == torch.float64 else torch.float32
    scale_a, scale_b, bias, residual, bias_up, *_ = (None if t is None else t.to(kind) for t in sides)
    result = sums.to(kind)
    for scale in (scale_a, scale_b):
        result = result if scale is None else result * scale
    result = result if alpha == 1 else result * alpha
    result = result if bias is None else result + (bias if beta == 1 else bias * beta)
    result = activated(result, activation)
    if up is not None:
        result = result * (up.to(kind) if bias_up is None else up.to(kind) + bias_up)
    return result if residual is None else result + residual


def apply_epilogue_in_dtype(
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return activation(alpha * sums + beta * bias) + residual in the dtype of sums, which it may change.

    A bias with beta = 0 is not read.
    """
    if alpha != 1:
        sums.mul_(alpha)
    if bias is not None and beta != 0:
        sums.add_(bias, alpha=beta)
    sums = activated(sums, activation)
    # autograd may have kept the activation for its derivative
    return sums if residual is None else (sums + residual).to(sums.dtype)
