"""Measuring configs of any kernel: compiled side by side, timed in a process that may be killed."""
