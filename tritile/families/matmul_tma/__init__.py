"""Products whose tiles travel by tensor descriptor (TMA)."""
