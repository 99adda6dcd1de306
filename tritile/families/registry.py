"""The kernels that tritile launches, by operation and family: the one list of them."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tritile.core.source import source_hash
from tritile.families.common.gated import gated_descriptor, gated_tile
from tritile.families.common.repack import repack
from tritile.families.grouped.kernel import grouped_matmul_tile
from tritile.families.grouped.kernel_tma import grouped_matmul_descriptor
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tile.kernel import matmul_tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_tma.kernel import matmul_descriptor
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.matmul_wgmma.kernel import matmul_warpgroups
from tritile.families.permute import family as packed
from tritile.families.permute.kernel import permute_tile
from tritile.families.permute.packed import permute_packed
from tritile.families.quantized import unpacked as quantized_unpacked
from tritile.families.quantized.kernel import linear_quantized
from tritile.families.quantized.unpack import unpack


@dataclass(frozen=True)
class Family:
    """A kernel that makes an operation, and kernels that run beside it and count for its digest."""

    op: str
    name: str
    kernel: Any
    also: tuple[Any, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """Return the digest of the source for which measurements count."""
        return source_hash(self.kernel, *self.also)


def _families(op: str, *families: tuple[Any, ...]) -> Mapping[str, Family]:
    return {name: Family(op, name, kernel, tuple(also)) for name, kernel, *also in families}


FAMILIES: Final[Mapping[str, Mapping[str, Family]]] = {
    "matmul": _families(
        "matmul",
        (tile.NAME, matmul_tile, gated_tile),
        (descriptor.NAME, matmul_descriptor, repack, gated_descriptor),
        (warpgroups.NAME, matmul_warpgroups, repack),
    ),
    "grouped": _families(
        "grouped",
        (tile.NAME, grouped_matmul_tile),
        (descriptor.NAME, grouped_matmul_descriptor),
    ),
    "permute": _families(
        "permute",
        (tile.NAME, permute_tile),
        (packed.NAME, permute_packed),
    ),
    "linear_quantized": _families(
        "linear_quantized",
        (tile.NAME, linear_quantized),
        (descriptor.NAME, linear_quantized),
        (quantized_unpacked.NAME, matmul_warpgroups, unpack, repack),
    ),
}


def kernel_name(op: str, family: str) -> str:
    """Return a kernel's name in files: "matmul/tile"."""
    return f"{op}/{family}"


def digests() -> dict[str, str]:
    """Return the digest of each kernel's source, by its name in files."""
    return {kernel_name(op, name): one.digest for op, own in FAMILIES.items() for name, one in own.items()}
