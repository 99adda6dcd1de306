"""How far rounding may carry what a whole computation gives, measured beside that computation in float64.

It is run in float64, and run again with errors: what an operation reads and what it gives is off by one step
of the modelled dtype, what a product gives by its bound of `tests.reference` besides, each element up or down
by a toss. An element that is off by rms on average is, all these errors being at their greatest, off by more
than t rms with a probability below 2 exp(-t^2 / 2), to first order (Hoeffding): t is 8, as for the sums of
`tests.reference`. This is the Monte Carlo arithmetic of Parker (1997), with bounds for errors. Products that
torch's larger operations make inside are not seen, and err as these do.
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.reference import tolerance

FP64 = torch.float64
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_RUNS = 8
_WALK = 8

Results = dict[str, torch.Tensor]


class Rounded(TorchDispatchMode):
    """Operations in float64 that err as those of a dtype may; `products` counts those of its products."""

    def __init__(self, dtype: torch.dtype, seed: int | None, tensor_cores: bool) -> None:
        super().__init__()
        self._dtype = dtype
        self._tensor_cores = tensor_cores
        self._tosses = None if seed is None else torch.Generator().manual_seed(seed)
        self.products = 0

    def _off(self, tensor: torch.Tensor, error: torch.Tensor | float = 0.0) -> torch.Tensor:
        """The tensor off by a step of the dtype, but where it is exactly 0, and by this error."""
        if tensor.dtype != FP64 or self._tosses is None:
            return tensor
        facts = torch.finfo(self._dtype)
        step = facts.eps * tensor.abs().nan_to_num(posinf=0) + facts.smallest_normal
        most = step * (tensor != 0) + error
        tosses = torch.randint(0, 2, tensor.shape, generator=self._tosses).to(tensor.device)
        return tensor + most * (2 * tosses - 1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        self.products += name in PRODUCTS
        if any(value.alias_info for value in (*func._schema.arguments, *func._schema.returns)):
            return func(*args, **kwargs)  # a view, or in place: nothing is rounded
        args, kwargs = tree_map_only(torch.Tensor, self._off, (args, kwargs))
        error = 0.0
        if name in PRODUCTS:
            a, b = (tensor.to(self._dtype) for tensor in args[-2:])
            error = tolerance(a, b, self._dtype, "ieee", self._tensor_cores)
        return tree_map_only(torch.Tensor, lambda out: self._off(out, error), func(*args, **kwargs))


def bounds(
    run: Callable[[], Results], dtype: torch.dtype, tensor_cores: bool
) -> tuple[Results, Results, int]:
    """What `run` gives in float64, how far off each element may be in this dtype, and how many products.

    What is given is itself of float64, and may be off by as much as any: beside it, float64 is off by twice.
    """
    with Rounded(dtype, None, tensor_cores) as exact:
        wanted = run()
    squares = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for seed in range(_RUNS):
        with Rounded(dtype, seed, tensor_cores):
            found = run()
        for name, value in found.items():
            squares[name] += (value - wanted[name]) ** 2
    walk = _WALK * (1 + torch.finfo(FP64).eps / torch.finfo(dtype).eps)
    return wanted, {name: walk * (total / _RUNS).sqrt() for name, total in squares.items()}, exact.products
