"""Share the parts of Hopper kernels whose warps are specialised, in Gluon: one producer, 1 to 3 consumers.

`facts` holds the tuples that these parts pass on, `order` tells which tiles a program makes, `pipeline` fills
and reads shared memory, `store` is the way out, `consume` a whole consumer and the start of all warps.
"""
