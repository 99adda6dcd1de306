"""Make a page of results: files to plain rows, rows to figures and tables, these to one HTML file."""
