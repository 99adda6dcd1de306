"""Tuning: which problems are measured, in what order configs are tried, and how they are timed."""
