"""Name GPUs as people do: "h100" for sm_90, "4090" for nvidia-geforce-rtx-4090."""

from typing import Final

from tritile.core import device as devices
from tritile.core.device import TARGETS, Device
from tritile.errors import InvalidValueError

SHORT: Final = {
    "h200": "nvidia-h200",
    "h100": "sm_90",
    "a100": "sm_80",
    "b200": "sm_100",
    "l40s": "nvidia-l40s",
    "4090": "nvidia-geforce-rtx-4090",
    "mi300x": "gfx942",
}


def known(name: str) -> str | None:
    """Return the key of `TARGETS` that a name stands for in any case, None for an unknown name.

    Names are those of `SHORT` and of `TARGETS`, and torch's, with hyphens or spaces: nvidia-h100-80gb-hbm3.
    """
    lowered = name.strip().lower()
    slugs = {device.slug: key for key, device in TARGETS.items()}
    key = SHORT.get(lowered.removeprefix("rtx").strip("-_ "), slugs.get(lowered.replace(" ", "-"), lowered))
    return key if key in TARGETS else None


def target_device(name: str) -> Device:
    """Return the GPU of a name, as "h100" or "sm_90". Raises InvalidValueError, with a list, for another."""
    key = known(name)
    if key is None:
        names = ", ".join(f"{short} ({key})" for short, key in SHORT.items())
        raise InvalidValueError(f"unknown GPU {name!r}: wanted one of {names}")
    return devices.target_device(key)
