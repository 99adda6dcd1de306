"""Launch a described call by a config: interpreted where tensors lie in host memory, compiled on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton

from tests.reference import words_of
from tritile.core import device as devices
from tritile.families import launching
from tritile.families.space import illegal

# Kernels of a test process run in one place alone: see tests/conftest.py.
INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"


def launched(call, config):
    """Make the call, or skip the test where the config is not legal; return what may be launched again."""
    if call.tensors[0].device.type == "cpu":
        return launching.run_interpreted(call, config)
    reason = illegal(config, call.problem, devices.gpu(0))
    if reason is not None:
        pytest.skip(reason)
    prepared = launching.prepare(call, config)
    prepared(*call.tensors)
    return prepared


def in_threads(*works):
    """Run these side by side, each in a new thread, and raise what one of them raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def captured(call):
    """Capture a call in a graph; return the graph, and what the call gave there."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = call()
    return graph, given


def replayed(call):
    """What a captured call gives when it is replayed, in memory that was poisoned after the capture."""
    graph, given = captured(call)
    words_of(given).fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    return given.clone()


def needs_memory(gigabytes):
    """Skip the test where the GPU has less memory left."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory")
