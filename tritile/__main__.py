"""Run tritile's command line: `python -m tritile`, and the command `tritile`."""

import sys


def main() -> None:
    """Run the command line; exit with a message where a package that it needs is missing."""
    try:
        from tritile.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"tritile: the command line needs {error.name}: pip install 'tritile[cli]'")
    run()


if __name__ == "__main__":
    main()
