"""Compare what has to be the same in every process of a distributed run."""

from collections.abc import Mapping
from typing import Any

import torch

from tritile.core.device import Device
from tritile.core.source import package_hash
from tritile.core.version import __version__
from tritile.families import registry as families

_MAX_TOLD = 3


def facts_of(device: Device) -> dict[str, str]:
    """Return versions of tritile and torch, the device's facts, and digests of kernels and code, by name."""
    kernels = {f"kernel {name}": digest for name, digest in families.digests().items()}
    facts = {name: str(value) for name, value in device.to_dict().items()}
    return {
        "tritile": __version__,
        "torch": torch.__version__,
        **facts,
        **kernels,
        "tritile's code": package_hash(),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[Any, Any]) -> str | None:
    """Say how the facts of another process differ from rank 0's (`ours`), None where they are equal."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    told = [
        f"{name} is {str(theirs.get(name))[:80]!r}, on rank 0 {ours.get(name)!r}"
        for name in names[:_MAX_TOLD]
    ]
    more = [f"{len(names) - _MAX_TOLD} more differences"] if len(names) > _MAX_TOLD else []
    return "; ".join(told + more) or None
