"""Turn a config into a running kernel: compile, launch, interpret."""
