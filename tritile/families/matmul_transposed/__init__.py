"""Products whose transpose is made, so that tensor cores take the columns of the result as their rows."""
