"""Explanations: what a problem costs with a config, what bounds it, and why others lose."""
