"""Draw tuning/pictures/badges.svg from pyproject.toml and the records of GPU tests.

`python tuning/figures.py` writes it. Nothing of it comes from the network.
"""

import sys
import tomllib
from html import escape
from typing import Final

from benchmark_kinds import HERE

ROOT: Final = HERE.parent
sys.path.append(str(ROOT))  # for tests.gpu

from tests.gpu import tested  # noqa: E402

PICTURE: Final = HERE / "pictures" / "badges.svg"
_STYLE: Final = """
text { font: 11px Verdana, "DejaVu Sans", sans-serif; fill: #fff }
.name { fill: #444c56 } .value { fill: #0969da }"""
_LETTER: Final = 7.2  # pixels, the widest that fonts of 11 px draw on average


def facts() -> dict[str, str]:
    """Return what each badge says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pairs = len(tested.STACKS) * len(tested.digests())
    passed = pairs - len(tested.pending())
    stacks = " and ".join(tested.STACKS)
    return {
        "python": project["requires-python"].removeprefix(">=") + " or later",
        "license": project["license"],
        "GPU tests": f"pass for {passed} of {pairs} kernels on Triton {stacks}",
    }


def picture() -> str:
    """Return the badges as SVG, one after the other."""
    body, left = "", 0.0
    for name, value in facts().items():
        for kind, words in (("name", name), ("value", value)):
            wide = _LETTER * len(words) + 12
            body += f'<rect class="{kind}" x="{left:.1f}" width="{wide:.1f}" height="20"/>\n'
            body += f'<text x="{left + wide / 2:.1f}" y="14" text-anchor="middle">{escape(words)}</text>\n'
            left += wide
        left += 8
    label = "; ".join(f"{name}: {value}" for name, value in facts().items())
    size = f'width="{left:.0f}" height="20" viewBox="0 0 {left:.0f} 20"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">\n'
        f"<style>{_STYLE}</style>\n{body}</svg>\n"
    )
