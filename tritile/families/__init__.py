"""The kernels, a folder each, with the configs they may run by: see `registry`."""
