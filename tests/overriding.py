"""Overrides of torch's calls on the CPU, and other threads, for tests of `use_in_torch`."""

from concurrent.futures import ThreadPoolExecutor

import tritile


def switch(policy="always"):
    return tritile.use_in_torch(policy, _keys=("CPU",))


def in_threads(*runs):
    """What each gives, or raises, in a thread of its own."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [each.result() for each in [pool.submit(run) for run in runs]]
