"""A problem becomes a config: measured here, shipped in a table, or predicted."""
