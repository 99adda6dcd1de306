"""`python -m tritile`, and the command `tritile`."""

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from tritile.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"tritile: the command line needs {error.name}: pip install 'tritile[cli]'")
    run()


if __name__ == "__main__":
    main()
