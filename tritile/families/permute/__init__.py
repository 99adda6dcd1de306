"""Permutations and transpositions."""
