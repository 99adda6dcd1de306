"""Results of benchmarks: measuring, format, summaries, tables, pages and pictures."""
