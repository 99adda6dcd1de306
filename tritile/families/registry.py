"""List all families, by operation and name: a new one is a folder, and a line here."""

from collections.abc import Mapping
from typing import Final

from tritile.families.family import Family
from tritile.families.grouped import family as grouped
from tritile.families.matmul_tile import family as matmul_tile
from tritile.families.matmul_tma import family as matmul_tma
from tritile.families.matmul_wgmma import family as matmul_wgmma
from tritile.families.odd_rows import family as odd_rows
from tritile.families.permute import boxes as permute_boxes
from tritile.families.permute import family as permute
from tritile.families.quantized import family as quantized
from tritile.families.skinny import family_k as skinny_k
from tritile.families.skinny import family_n as skinny_n

ALL: Final = (
    matmul_tile.FAMILY,
    matmul_tma.FAMILY,
    matmul_wgmma.FAMILY,
    skinny_k.FAMILY,
    skinny_n.FAMILY,
    odd_rows.FAMILY,
    grouped.TILE,
    grouped.DESCRIPTOR,
    permute.TILE,
    permute_boxes.FAMILY,
    quantized.TILE,
    quantized.TMA,
)
FAMILIES: Final[Mapping[str, Mapping[str, Family]]] = {
    op: {family.name: family for family in ALL if family.op == op}
    for op in dict.fromkeys(family.op for family in ALL)
}


def digests() -> dict[str, str]:
    return {family.label: family.digest for family in ALL}
