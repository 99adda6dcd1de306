"""Epilogues: what is done to the sums of a product before they are stored."""

import functools
from dataclasses import dataclass, fields
from typing import Final

from tritile.errors import InvalidValueError

# What an operand of an epilogue differs by: not at all, by columns (it is one row), by rows, by both.
SPREADS: Final = ("one", "row", "column", "full")
ACTIVATIONS: Final = ("relu", "gelu", "gelu_tanh", "silu")
REMAINDER: Final = "remainder"


@dataclass(frozen=True)
class Epilogue:
    """out = activation(alpha * scale_a * scale_b * (a @ b) + beta * bias) + residual.

    `scale_a`, `scale_b`, `bias` and `residual` say how each is spread over the result (see SPREADS), "" where
    there is none; `activation` is one of ACTIVATIONS or "". `weighted`: alpha and beta are given.

    Of int32 sums `activation` may be REMAINDER, for lowered products: they modulo scale_a, which differs by
    matrix alone, as near 0 as they go.

    As text it is the names of what there is: "scale_a=column scale_b=row bias=row gelu".
    Raises InvalidValueError for anything that could not be one.
    """

    scale_a: str = ""
    scale_b: str = ""
    bias: str = ""
    residual: str = ""
    activation: str = ""
    weighted: bool = False

    def __post_init__(self) -> None:
        spreads = (self.scale_a, self.scale_b, self.bias, self.residual)
        good = all(spread in ("", *SPREADS) for spread in spreads) and isinstance(self.weighted, bool)
        if self.activation == REMAINDER:
            good = good and spreads == ("one", "", "", "") and not self.weighted
        elif self.activation not in ("", *ACTIVATIONS):
            good = False
        if not good:
            raise InvalidValueError(
                f"{self!r}: wanted spreads of {', '.join(SPREADS)}, an activation of {', '.join(ACTIVATIONS)}"
            )

    def __str__(self) -> str:
        sides = [f"{name}={getattr(self, name)}" for name in SIDES if getattr(self, name)]
        weighted = ["weighted"] * self.weighted
        return " ".join([*sides, *weighted, *[self.activation] * bool(self.activation)])

    @property
    def constants(self) -> tuple[str | bool, ...] | None:
        """What kernels are compiled for: the fields in their order, None where nothing is to be done."""
        return tuple(getattr(self, field.name) for field in fields(self)) if str(self) else None

    @property
    def transposed(self) -> "Epilogue":
        """The same of the product out^T = b^T a^T."""
        turned = {"row": "column", "column": "row"}
        scale_b, scale_a, bias, residual = (turned.get(s, s) for s in (getattr(self, n) for n in SIDES))
        return Epilogue(scale_a, scale_b, bias, residual, self.activation, self.weighted)


SIDES: Final = ("scale_a", "scale_b", "bias", "residual")  # its operands, in the order kernels take them


@functools.cache
def epilogue_of(text: str) -> Epilogue:
    """The epilogue that `str` wrote. Raises InvalidValueError for anything else."""
    found: dict[str, str | bool] = {}
    for word in text.split(" ") if text else []:
        name, _, spread = word.partition("=")
        if spread and name in SIDES:
            found[name] = spread
        elif word == "weighted":
            found[word] = True
        else:
            found["activation"] = word
    epilogue = Epilogue(**found)  # type: ignore[arg-type]
    if str(epilogue) != text:
        raise InvalidValueError(f"epilogue {text!r}: wanted {str(epilogue)!r}")
    return epilogue
