"""Describe epilogues: what is done to the sums of a product before they are stored."""

import functools
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

from tritile.errors import InvalidValueError

# How an operand varies over the result: not at all, by columns (it is one row), by rows, by both.
SPREADS: Final = ("one", "row", "column", "full")
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)


@dataclass(frozen=True, repr=False)
class Epilogue:
    """Describe activation(alpha * scale_a * scale_b * a @ b + beta * bias) + residual.

    With `gated` it is activation(...) * (a @ up + bias_up) + residual, for a second matrix `up` of the size
    of b.

    - Each operand says how it is spread over the result (see SPREADS), "" where there is none.
    - `activation` is one of ACTIVATIONS or "".
    - `weighted`: alpha and beta are given.

    It is false where nothing is to be done. In files, on command lines and in messages it is the text that
    `str` returns and `parse` reads, which lists what there is: "scale_a=column scale_b=row bias=row gelu".
    Raises InvalidValueError where a field is out of its range.
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
                f"{self!r}: wanted spreads of {', '.join(SPREADS)}, an activation of {', '.join(ACTIVATIONS)}"
            )
        if self.bias_up and not self.gated:
            raise InvalidValueError(f"{self!r}: wanted bias_up only where gated")

    def __str__(self) -> str:
        sides = [f"{name}={getattr(self, name)}" for name in SIDES if getattr(self, name)]
        flags = [name for name in _FLAGS if getattr(self, name)]
        return " ".join([*sides, *flags, *[self.activation] * bool(self.activation)])

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
            raise InvalidValueError(f"epilogue {text!r}: wanted {str(epilogue)!r}")
        return epilogue

    @property
    def constants(self) -> tuple[str | bool, ...] | None:
        """Return what kernels are compiled for: the fields in order, None where nothing is to be done."""
        return tuple(getattr(self, field.name) for field in fields(self)) if self else None


# Operands in the order kernels take them.
SIDES: Final = ("scale_a", "scale_b", "bias", "residual", "bias_up")
_FLAGS: Final = ("weighted", "gated")
BARE: Final = Epilogue()
