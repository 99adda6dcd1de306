"""Make products whose tiles travel by tensor descriptor (TMA)."""
