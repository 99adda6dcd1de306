"""Products to the precision of float64 and float32, made of int8 products."""
