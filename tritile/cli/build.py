"""Build the library in C++ ahead of the first process that needs it: `tritile build`."""

from tritile.cli.shared import app, console
from tritile.in_torch import building


@app.command("build")
def build() -> None:
    """Build the library in C++ that tritile.use_in_torch uses, into the cache (TRITILE_CACHE_DIR).

    Run it in a container's image, for example: else the first process there builds it, which takes 10
    seconds.
    """
    console.print(f"the library is in {building.build()}", highlight=False, soft_wrap=True)
