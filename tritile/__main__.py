"""Run tritile's command line: `python -m tritile`, and the command `tritile`."""

from tritile.cli import main

if __name__ == "__main__":
    main()
