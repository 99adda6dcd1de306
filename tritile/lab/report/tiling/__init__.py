"""Pictures of tilings: which tiles a kernel makes, of which blocks, by which program, and in what order."""

from tritile.lab.report.tiling.order import Place, Tiling, tiling_of
from tritile.lab.report.tiling.page import page
from tritile.lab.report.tiling.steps import Block, Move, Step, move_of, step_of, total_bytes
from tritile.lab.report.tiling.still import png, svg
from tritile.lab.report.tiling.texts import label

__all__ = [
    "Block", "Move", "Place", "Step", "Tiling", "label", "move_of", "page", "png", "step_of", "svg",
    "tiling_of", "total_bytes",
]  # fmt: skip
