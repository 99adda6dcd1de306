"""Describe a family of kernels to those who choose and launch: `Family`."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.source import source_hash
from tritile.families.common.cost import Program
from tritile.families.numerics import Numerics, canonical_product, of_product
from tritile.runtime.work import Kernel, Work


@dataclass(frozen=True)
class Family:
    """Describe a kernel that makes an operation by configs of its own.

    - `space()`: yields every config.
    - `illegal(config, problem, device)`: says why a config may not run a problem, None if it may.
    - `is_dominated(config, problem, device)`: true if another config does the same work or less.
    - `cost(config, problem, device)`: returns what a program of a product does, from which the formula of all
      products predicts a time; or microseconds, by a formula of its own.
    - `work(call, config, processors, early)`: returns what launches a call: see
      `tritile.families.work.work_of`.
    - `numerics(config, problem, device)`: returns what decides the bits of an element.
    - `canonical(problem, device)`: returns the numerics of batch-invariant calls, for all families of an
      operation.
    - `options`: parameters that only some configs have.
    - `also`: other kernels of its launches, which count for its digest.
    - `resident(config, problem, device)`: returns how many programs an SM holds at once; None if that is
      unknown.
    - `contends(problem)`: true if one of its configs can be the fastest.
    - `margin`: how many times as long a predicted pick has to be predicted to take, for the family's own to
      run in its place. None if classes hold its configs: other formulas are not fitted to measurements.
    - `copies`: true if an operand that TMA cannot read is copied first.
    - `interpreted(problem)`: returns the config in Triton's interpreter, of an operation's first family; None
      for large tiles.
    """

    op: str
    name: str
    kernel: Kernel
    space: Callable[[], Iterable[Config]]
    illegal: Callable[[Config, Any, Device], str | None]
    is_dominated: Callable[[Config, Any, Device], bool]
    cost: Callable[[Config, Any, Device], Program | float]
    work: Callable[[Any, Config, int, bool], Work]
    numerics: Callable[[Config, Any, Device], Numerics] = of_product
    canonical: Callable[[Any, Device], Numerics] = canonical_product
    also: tuple[Kernel, ...] = ()
    options: tuple[str, ...] = ()
    resident: Callable[[Config, Any, Device], int] | None = None
    contends: Callable[[Any], bool] = lambda problem: True
    margin: float | None = None
    copies: bool = False
    interpreted: Callable[[Any], Config] | None = None

    @property
    def label(self) -> str:
        """Return the kernel's name in files: "matmul/tile"."""
        return f"{self.op}/{self.name}"

    @functools.cached_property
    def configs(self) -> tuple[Config, ...]:
        """Return every config: thousands, which are made when first needed."""
        return tuple(self.space())

    @functools.cached_property
    def digest(self) -> str:
        """Return the digest of the source for which measurements count."""
        return source_hash(*(kernel.jitted for kernel in (self.kernel, *self.also)))
