"""Make products to the precision of float64 and float32 by int8 products."""
