"""Make products on any GPU: a program makes a tile, through pointers."""
