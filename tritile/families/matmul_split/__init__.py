"""Make products whose last tiles are split along K, by specialised warps on Hopper, in Gluon."""
