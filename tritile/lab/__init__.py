"""Benchmarks, explanations, reports and the ladder of tutorial kernels; no other room but cli imports it."""
