"""Make products of one to eight rows without tensor cores, at the pace at which the matrix is read."""
