"""Turn a problem into a config: measured here, shipped in a table, or predicted. Start at `pick`."""
