"""A config becomes a running kernel: compiling, launching, interpreting."""
