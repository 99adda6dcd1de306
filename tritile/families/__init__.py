"""Hold the kernels, a folder for each family, with the configs they may run by: see `registry`."""
