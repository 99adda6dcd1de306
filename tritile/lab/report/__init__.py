"""Results of benchmarks: their format, what they sum up to, and how they are shown."""
