"""Measure configs of any kernel: compile them side by side, time them in a process that may be killed."""
