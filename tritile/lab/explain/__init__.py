"""Explain what a problem costs with a config, what bounds it, and why other configs are slower."""

from tritile.lab.explain.explanation import Explanation, Other, explained
from tritile.lab.explain.wanted import config_like

__all__ = ["Explanation", "Other", "config_like", "explained"]
