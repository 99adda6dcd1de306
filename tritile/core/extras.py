"""Name the optional packages that commands need, and the extra of pyproject.toml that brings each."""

from typing import Final

EXTRAS: Final = {"report": ("altair", "vl_convert")}


def extra_advice(missing: str) -> str:
    """Return how to install a missing module; "" where it is of no extra."""
    extra = next((extra for extra, names in EXTRAS.items() if missing.partition(".")[0] in names), "")
    return f'pip install "tritile[{extra}]"' if extra else ""
