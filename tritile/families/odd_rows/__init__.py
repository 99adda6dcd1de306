"""Make products of few rows by tensor cores, at the pace at which a matrix of odd rows is read."""
