"""Make float32 products by three products of float16."""
