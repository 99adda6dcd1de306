"""Products by specialised warps on Hopper, in Gluon."""
