"""Tutorial kernels from a naive one up to the library's own, one idea a step: for learning why tiles win."""
