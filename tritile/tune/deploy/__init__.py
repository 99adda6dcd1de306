"""Deploying: a folder in which Triton finds every kernel compiled, made and proven without a GPU."""
