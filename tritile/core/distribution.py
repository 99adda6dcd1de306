"""The distribution: the version of tritile, and the extras of pyproject.toml that bring optional packages."""

from pathlib import Path
from typing import Final

__version__ = "0.1.0"

EXTRAS: Final = {"report": ("altair", "vl_convert")}


def extra_advice(missing: str) -> str:
    """Return how to install a missing module; "" where it is of no extra.

    In a checkout its own extra is installed: a package index may have no such version.
    """
    extra = next((extra for extra, names in EXTRAS.items() if missing.partition(".")[0] in names), "")
    root = Path(__file__).resolve().parents[2]
    which = f'-e "{root}[{extra}]"' if (root / "pyproject.toml").is_file() else f'"tritile[{extra}]"'
    return f"pip install {which}" if extra else ""
