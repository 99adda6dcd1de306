"""Kernels that climb from naive to the library's own, one idea a rung: for learning why tiles win."""
