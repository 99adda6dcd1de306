"""The tiling of a problem as an interactive page: one HTML file that loads nothing else."""

import json
from typing import Any, Final

from jinja2 import Environment, PackageLoader

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError
from tritile.lab.report.tiling.order import Tiling, tiling_of
from tritile.lab.report.tiling.steps import lanes_of, strides_of, whole_rows
from tritile.lab.report.tiling.texts import label, notes, order_name, plain_name, title

PAGES: Final = Environment(loader=PackageLoader("tritile.lab.report", "pages"), autoescape=True)


def _of_problem(tiling: Tiling) -> dict[str, Any]:
    problem, config = tiling.problem, tiling.config
    sides = {"m": problem.m, "n": problem.n, "itemsize": problem.itemsize}
    if isinstance(problem, MatmulProblem):
        return sides | {"k": problem.k, "block_k": config["BLOCK_K"]}
    more = {"block_m": config["BLOCK_M"], "block_n": config["BLOCK_N"], "turned": problem.turns}
    return sides | more | {
        "dims": strides_of(problem), "lanes": lanes_of(tiling), "whole": whole_rows(tiling)
    }  # fmt: skip


def _facts(tiling: Tiling, start: tuple[int, int] | None) -> dict[str, Any]:
    """Return the sizes and counts from which the page's script finds tiles and blocks itself."""
    names = ("rows", "columns", "matrices", "group", "by_columns", "programs", "resident", "parts", "ranges",
             "blocks", "at_once", "covers")  # fmt: skip
    return {
        "op": tiling.problem.op,
        **{name: getattr(tiling, name) for name in names},
        **_of_problem(tiling),
        "processors": tiling.device.processors // tiling.config.num_ctas,
        "orders": order_name(tiling),
        "plain": plain_name(tiling),
        "turn_name": "Program" if tiling.programs == tiling.turns else "Tile",
        "start": start,
    }


def checked_start(tiling: Tiling, tile: int, step: int) -> tuple[int, int]:
    """Return a turn and a step, both from 0, given a turn from 0 and a step from 1.

    Raises InvalidValueError where they do not exist.
    """
    tiling.place(tile)  # raises where there is no such turn
    steps = len(tiling.k_blocks(tile)) if isinstance(tiling.problem, MatmulProblem) else 2
    if not 1 <= step <= steps:
        raise InvalidValueError(f"step {step}: wanted one of 1 to {steps}")
    return tile, step - 1


def page(
    problem: MatmulProblem | PermuteProblem,
    config: Config,
    device: Device,
    tile: int | None = None,
    step: int | None = None,
) -> str:
    """Return the page for a problem and a config, as HTML.

    The page plays from the first step of the first tile, or stands at `tile` (turns from 0 in the order in
    which they start) and `step` (from 1). Raises InvalidValueError where the config is not legal for the
    problem on the device, or where there is no such tile or step.
    """
    tiling = tiling_of(problem, config, device)
    plays = tile is None and step is None
    start = None if plays else checked_start(tiling, tile or 0, 1 if step is None else step)
    facts = _facts(tiling, start)
    text = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    told = {"title": title(tiling), "label": label(problem), "device": device.name, "config": str(config)}
    return PAGES.get_template("tiling.html").render(facts | told | {"notes": notes(tiling), "facts": text})
