"""Bare kernels: jitted code and nothing else."""
