"""Make products by specialised warps on Hopper, in Gluon."""
