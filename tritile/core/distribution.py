"""The distribution: the version of tritile."""

__version__ = "0.2.0"
