"""Products of complex numbers, made of products of real ones."""
