"""Share code among kernels of several families."""
