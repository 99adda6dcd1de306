"""Make fp8 products with a scale for each 128 of K, by specialised warps on Hopper, in Gluon."""
