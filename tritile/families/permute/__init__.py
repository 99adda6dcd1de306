"""Permute and transpose."""
