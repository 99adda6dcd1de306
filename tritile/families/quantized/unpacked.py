"""Unpack quantized weights in memory, for torch to multiply by."""

import torch

from tritile.core import device as devices
from tritile.core.config import ATEN
from tritile.core.problem import QuantizedProblem, unpacked_row, words_shape
from tritile.families.quantized.family import WEIGHT, unpacking
from tritile.families.work import early
from tritile.runtime.compiles import log_compiles_as, refuse_if_strict
from tritile.runtime.launch import Launch, bound


class Unpack:
    """Unpack quantized weights (n, k) of one kind, on one GPU: a prepared call keeps it.

    A call returns the weight as a matrix (n, k) of 16-bit floats, in memory of its own. Values are rounded to
    the dtype of the scales, as those of `QuantizedWeight.dequantize` are. Rows begin on 128 bytes. Raises
    TuningError where the kernel does not compile here, NotCompiledError where it would have to be compiled in
    mode "strict".
    """

    def __init__(self, n: int, k: int, bits: int, group_size: int) -> None:
        self._kind = n, k, bits, group_size
        self._launches: dict[tuple[int, ...], Launch] = {}  # by where each part begins within 16 bytes

    def __call__(self, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        n, k, bits, _ = self._kind
        parts = (words, scales) if zeros is None else (words, scales, zeros)
        row = unpacked_row(k)
        # As many rows as are packed: the kernel writes those of padding, too.
        memory = torch.empty((words_shape(n, k, bits)[0] * 8, row), dtype=scales.dtype, device=scales.device)
        low = tuple(part.data_ptr() & 15 for part in parts)
        if low not in self._launches:
            self._launches[low] = self._prepared((*parts, memory))
        self._launches[low](*parts, memory)
        return memory.as_strided((n, k), (row, 1))

    def _prepared(self, tensors: tuple[torch.Tensor, ...]) -> Launch:
        n, k, bits, group_size = self._kind
        names, dtype = ("words", "scales", "zeros")[: len(tensors) - 1], tensors[1].dtype
        index, zeros = tensors[0].device.index, len(names) == 3
        problem = QuantizedProblem(1, n, k, str(dtype).removeprefix("torch."), bits, group_size, zeros)
        work = unpacking(problem, early(devices.gpu(index)))._replace(scratch={})
        what = f"what unpacks a weight ({n}, {k}) of {bits} bits"
        advice = "run `tritile compile` or `tritile.warm` for a call, or call it once in another mode"
        with log_compiles_as(problem.label, ATEN), refuse_if_strict(what, advice):
            return bound(work, dict(zip((*names, WEIGHT), tensors, strict=True)), index, f"{what} cannot run")
