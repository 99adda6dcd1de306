"""`python -m tritile`: the command line."""

from tritile.cli import main

if __name__ == "__main__":
    main()
