"""Batch invariance: a row of a product has the same bits whatever rows come with it.

`context.py` has `tritile.batch_invariant`, `overrides.py` what takes the place of torch's own products,
`report.py` the list of what else ran, `check.py` runs a model with several batches and compares.
How the kernels sum alike for any number of rows is in `tritile.families.numerics`.
"""
