"""What was measured: trials, in a file per GPU model, and tables that ship with kernels."""
