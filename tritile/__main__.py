"""Run tritile's command line: `python -m tritile`, and the command `tritile`."""

import sys


def main() -> None:
    """Run the command line; exit with status 2 and a message where a command needs an extra."""
    from tritile.cli import main as run
    from tritile.core.distribution import extra_advice

    try:
        run()
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not extra_advice(name):
            raise
        print(f"tritile: this needs {name}: {extra_advice(name)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
