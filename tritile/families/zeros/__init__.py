"""Make int8 products with zero points."""
