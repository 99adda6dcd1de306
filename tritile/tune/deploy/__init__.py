"""Deploying: make, and prove complete, a folder of compiled kernels for Triton, without a GPU."""
