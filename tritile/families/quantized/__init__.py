"""Make products with packed weights."""
