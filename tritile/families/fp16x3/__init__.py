"""float32 products made of three products of float16."""
