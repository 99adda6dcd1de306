"""Make products of complex numbers by products of real ones."""
