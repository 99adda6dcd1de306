"""Explanations: what a problem costs with a config, what bounds it, and why others lose."""

from tritile.explain.explanation import Explanation, Other, explained
from tritile.explain.wanted import config_like

__all__ = ["Explanation", "Other", "config_like", "explained"]
