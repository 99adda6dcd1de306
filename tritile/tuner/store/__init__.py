"""What was measured: trials in a file for each GPU model, and tables that ship beside kernels."""
