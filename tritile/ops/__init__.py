"""Run the public operations: check the arguments, allocate the output, launch the kernel."""
