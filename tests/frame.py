"""How the package is cut, as a table: `python tests/frame.py`.

Packed weights stand for any idea that should lie in few files. The chain of rooms is that of the imports
which are run when a module is loaded, from the lowest room to the command line.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tritile"
_PACKED = re.compile(r"\bQuantized(Problem|Call)\b")
_TUNES = ("tritile.tune", "tritile.lab", "tritile.cli")


def modules() -> list[Path]:
    """The package's own modules."""
    return sorted(PACKAGE.rglob("*.py"))


def naming_packed_weights() -> list[str]:
    """Modules that name the problem or the call of packed weights."""
    return [str(path.relative_to(PACKAGE)) for path in modules() if _PACKED.search(path.read_text())]


def rooms() -> dict[str, set[str]]:
    """Each room with those that it imports as it is loaded, the package's own face left out."""
    found: dict[str, set[str]] = {}
    for path in modules():
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here.startswith("__"):
            continue
        others = found.setdefault(here, set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tritile."):
                others.add(node.module.split(".")[1])
            elif isinstance(node, ast.ImportFrom) and node.module == "tritile":
                others |= {alias.name for alias in node.names}
        others.discard(here)
    return {room: others & set(found) for room, others in found.items()}


def longest_chain() -> list[str]:
    """The rooms of the longest chain of imports, the lowest first."""
    below = rooms()

    @functools.cache
    def chain(room: str) -> tuple[str, ...]:
        return (*max((chain(other) for other in below[room]), key=len, default=()), room)

    return list(max(map(chain, below), key=len))


def loaded_that_tune() -> list[str]:
    """Modules that belong to tuning and are loaded by importing tritile and one launched product."""
    code = (
        "import sys, torch, tritile\n"
        "tritile.matmul(torch.ones(5, 3), torch.ones(3, 4))\n"
        f"print(*sorted(name for name in sys.modules if name.startswith({_TUNES!r})))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    ).stdout.split()


def lines() -> int:
    """Lines of the package's modules."""
    return sum(len(path.read_text().splitlines()) for path in modules())


def main() -> None:
    """Print the table."""
    chain, packed, tuning = longest_chain(), naming_packed_weights(), loaded_that_tune()
    print(f"modules that name packed weights    {len(packed):6}  {', '.join(packed)}")
    print(f"longest chain of rooms              {len(chain):6}  {' < '.join(chain)}")
    print(f"modules of tuning that a call loads {len(tuning):6}  {', '.join(tuning)}")
    print(f"lines in tritile/                   {lines():6}")


if __name__ == "__main__":
    main()
