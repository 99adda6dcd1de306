"""Say in words what the precisions of products mean, and how far each may be from exact."""

from collections.abc import Sequence
from typing import Final

from tritile.core.problem import AS_TORCH, FP8_DTYPES, error_bound

_PLAIN: Final = {"float32": "fp32", "float64": "fp64"}
_WORDS: Final = {
    "fp16x3": "three products of fp16 parts on tensor cores",
    "tf32": "one product in TF32 on tensor cores",
    "fast": "sums stay in the tensor cores",
    AS_TORCH: "as torch's setting says, which tritile does not know",
}
_ERRORS: Final = {
    "fp16x3": "error near fp32's",
    "tf32": "11 bits of each input",
    "fast": "14 bits on Hopper",
    AS_TORCH: "error of torch's kernel",
}
_HOPPER: Final = 90  # the GPUs for which the bound of fp16x3 is derived


def meaning(precision: str, dtype: str) -> str:
    """Return how products in a precision of a dtype are made, in a few words."""
    if precision == "ieee":
        return "sums move to fp32 every 128 of K" if dtype in FP8_DTYPES else f"plain {_PLAIN[dtype]}"
    return _WORDS[precision]


def explained(precisions: Sequence[str], dtype: str) -> str:
    """Return each precision of a dtype with its meaning and error, for the end of a message."""
    words = (", ".join(filter(None, (meaning(name, dtype), _ERRORS.get(name)))) for name in precisions)
    return "; ".join(f"{name}: {text}" for name, text in zip(precisions, words, strict=True))


def error_words(precision: str, k: int, arch: int | str) -> str:
    """Return how far elements of a float32 product of K terms are from exact, on a GPU of an architecture."""
    if precision == "fp16x3" and arch == _HOPPER:
        return f"error within {error_bound(k):.0e} of |a| |b|"
    if precision == "tf32":
        return f"error about {2.0**-10:.0e} of |a| |b|"
    return "error at most torch's fp32" if precision == "ieee" else _ERRORS[precision]
