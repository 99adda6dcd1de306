"""Make products for which b is copied row by row first."""
