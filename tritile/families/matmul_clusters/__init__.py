"""Make products by clusters of two programs that share tiles of an operand, on Hopper, in Gluon."""
