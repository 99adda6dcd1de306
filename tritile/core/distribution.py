"""The distribution: the version of tritile."""

__version__ = "0.1.0"
