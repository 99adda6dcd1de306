"""Unpack quantized weights in memory, for torch to multiply by."""

from typing import Any, Final

import torch

from tritile.core import device as devices
from tritile.core.config import ATEN
from tritile.core.forgetting import new_memo
from tritile.core.problem import QuantizedProblem, unpacked_row, words_shape
from tritile.families.quantized.family import WEIGHT, unpacking
from tritile.families.work import early
from tritile.runtime.compiles import as_mode_asks, asking
from tritile.runtime.launch import Launch, bound

_LAUNCHES: Final[dict[Any, Launch]] = new_memo()


def unpacked(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    n: int, k: int, bits: int, group_size: int,
) -> torch.Tensor:  # fmt: skip
    """Return a quantized weight on a GPU as a matrix (n, k) of 16-bit floats, in memory of its own.

    Values are rounded to the dtype of the scales, as those of `QuantizedWeight.dequantize` are. Rows begin on
    128 bytes. Raises TuningError where the kernel does not compile here, NotCompiledError where it would have
    to be compiled in mode "strict".
    """
    parts = (words, scales) if zeros is None else (words, scales, zeros)
    row = unpacked_row(k)
    # As many rows as are packed: the kernel writes those of padding, too.
    memory = torch.empty((words_shape(n, k, bits)[0] * 8, row), dtype=scales.dtype, device=scales.device)
    starts = (part.data_ptr() & 15 for part in parts)  # kernels are compiled for them
    key = (n, k, bits, group_size, scales.dtype, words.device.index, *starts)
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = _prepared((*parts, memory), n, k, bits, group_size)
    launch(*parts, memory)
    return memory.as_strided((n, k), (row, 1))


def _prepared(tensors: tuple[torch.Tensor, ...], n: int, k: int, bits: int, group_size: int) -> Launch:
    names, dtype = ("words", "scales", "zeros")[: len(tensors) - 1], tensors[1].dtype
    index, zeros = tensors[0].device.index, len(names) == 3
    problem = QuantizedProblem(1, n, k, str(dtype).removeprefix("torch."), bits, group_size, zeros)
    work = unpacking(problem, early(devices.gpu(index)))._replace(scratch={})
    what = f"what unpacks a weight ({n}, {k}) of {bits} bits"
    advice = "run `tritile compile` or `tritile.warm` for a call, or call it once in another mode"
    with asking(problem.label, ATEN), as_mode_asks(what, advice):
        return bound(work, dict(zip((*names, WEIGHT), tensors, strict=True)), index, f"{what} cannot run")
