"""The distribution: the version of tritile, and the extras of pyproject.toml that bring optional packages."""

from typing import Final

__version__ = "0.1.0"

EXTRAS: Final = {"report": ("altair", "vl_convert")}


def extra_advice(missing: str) -> str:
    """Return how to install a missing module; "" where it is of no extra."""
    extra = next((extra for extra, names in EXTRAS.items() if missing.partition(".")[0] in names), "")
    return f'pip install "tritile[{extra}]"' if extra else ""
