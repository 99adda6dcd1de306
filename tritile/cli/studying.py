"""Look into the tuner itself, and write figures: `tritile tune --study`."""

import json
from pathlib import Path

from rich.table import Table as RichTable

from tritile.cli.shared import console
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.lab.report.environment import environment
from tritile.tune import study as studies
from tritile.tune import suites

TIMED_SUITE = "llm"


def study(problems: list[Tiled], device: Device, jobs: int | None, output: Path, folder: Path) -> None:
    """Study how problems are tuned on the current GPU. `folder` has the suite that is timed."""
    timed = [case.problem for case in suites.find([TIMED_SUITE], folder) if case.layout == "NT"]

    def say(text: str) -> None:
        console.print(text, highlight=False)

    found = studies.study(problems, timed, device, devices.current_index(), jobs, say=say)
    found["env"] = environment(device)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")
    grid = RichTable("figure", "value")
    for name, value in found.items():
        if isinstance(value, int | float):
            grid.add_row(name, f"{value:.4g}")
    console.print(grid)
    console.print(f"written to {output}")
