"""Pictures of tilings: which tiles a kernel makes, of which blocks, by which program, and in what order."""

from tritile.report.tiling.blocks import Block, Sharing, Step, sharing, step_of, total_bytes
from tritile.report.tiling.moves import Move, move_of
from tritile.report.tiling.order import Place, Tiling, tiling_of

__all__ = [
    "Block", "Move", "Place", "Sharing", "Step", "Tiling", "move_of", "sharing", "step_of", "tiling_of",
    "total_bytes",
]  # fmt: skip
