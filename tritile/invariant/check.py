"""`tritile.check_invariant`: run a model with several batches, and find the first operation that differs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tritile.core.markup import Tabular
from tritile.core.torch_private import TorchDispatchMode, leaves_of, map_leaves
from tritile.errors import InvalidValueError, ShapeError

_BATCHES: Final = (1, 2, 7, 64)
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME: Final = 1_000_003


class Run(NamedTuple):
    """A run of the model: which rows of the full batch, in their order, and what to call it."""

    rows: tuple[int, ...]
    name: str


@dataclass(frozen=True, repr=False)
class InvarianceCheck(Tabular):
    """Whether a row has the same bits in every batch. It prints as a table, and is true if so.

    Attributes:
        equal: True if all results are.
        runs: how many batches were compared with the full one.
        differing: rows of the results that differed, by the name of the run.
        operation: the first operation whose result differed, as torch's dispatcher names it. "" if all are
            equal, or none of those that could be compared differs.
        module: the name of the module that it ran in, "" outside of all.
        number: how many operations ran before it.
    """

    equal: bool
    runs: int
    differing: dict[str, int]
    operation: str = ""
    module: str = ""
    number: int = 0

    def __bool__(self) -> bool:
        return self.equal

    @property
    def _title(self) -> str:
        if self.equal:
            return f"batch-invariant: {self.runs} batches gave each row the same bits"
        return f"not batch-invariant: in {len(self.differing)} of {self.runs} batches rows had other bits"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [(name, f"{count} differ") for name, count in self.differing.items()]
        if self.operation:
            where = f" in {self.module}" if self.module else ""
            rows.append(("first", f"{self.operation}{where}, after {self.number} operations"))
        elif not self.equal:
            rows.append(("first", "no single operation: a compiled graph, or kernels called without torch"))
        return rows


def _sums(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return a checksum of the bits of each of `count` parts of a dimension, in exact arithmetic."""
    parts = tensor.detach().movedim(dim, 0).reshape(count, -1).contiguous()
    words = parts.view(_WORDS[min(8, parts.element_size())]).reshape(count, -1).long()
    places = torch.arange(1, words.shape[1] + 1, device=words.device) * _PRIME % (2**31 - 1)
    return (words * places).sum(1)


class _Trace(TorchDispatchMode):
    """Note each operation: its name, module, and result, of which `keep` makes what is kept."""

    def __init__(self, keep: Callable[[int, torch.Tensor], Any], modules: dict[int, str]) -> None:
        super().__init__()
        self.found: list[tuple[str, str, list[Any]]] = []
        self._keep, self._modules, self._within = keep, modules, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = [each for each in leaves_of(result) if isinstance(each, torch.Tensor)]
            kept = [self._keep(len(self.found), each) for each in leaves]
            self.found.append((func.name(), self._within[-1] if self._within else "", kept))
        return result

    def __enter__(self) -> "_Trace":
        self._hooks = ExitStack()
        for hook in (
            register_module_forward_pre_hook(lambda module, args: self._within.append(self._name(module))),
            register_module_forward_hook(self._leave),
        ):
            self._hooks.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._within.pop()

    def _name(self, module: torch.nn.Module) -> str:
        return self._modules.get(id(module)) or type(module).__name__


def _split_at(shape: Sequence[int], other: Sequence[int], rows: int, of_other: int) -> int | None:
    """Return the dimension that has the rows, by the shape in a batch of another size; None if none does."""
    if len(shape) != len(other):
        return None
    differing = [dim for dim, pair in enumerate(zip(shape, other, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1:
        return None
    (dim,) = differing
    return dim if shape[dim] * of_other == other[dim] * rows else None


class _Model:
    """A model, and its inputs in the full batch."""

    def __init__(self, function: Callable[..., Any], inputs: Any, total: int) -> None:
        self.function, self.total = function, total
        self.inputs = inputs if isinstance(inputs, tuple | dict) else (inputs,)
        leaves = leaves_of(self.inputs)
        if not any(self._has_rows(each) for each in leaves):
            raise ShapeError(
                f"check_invariant: make({total}) made no tensor whose first dimension is {total}"
            )
        named = function.named_modules() if isinstance(function, torch.nn.Module) else ()
        self.modules = {id(each): name for name, each in named}

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == self.total

    def result(self, rows: tuple[int, ...]) -> Any:
        def cut(value: Any) -> Any:
            return value[list(rows)] if self._has_rows(value) else value

        given = map_leaves(cut, self.inputs)
        return self.function(**given) if isinstance(given, dict) else self.function(*given)

    def outputs(self, rows: tuple[int, ...]) -> torch.Tensor:
        """Return a checksum of each row of all results."""
        found = [
            _sums(each, 0, len(rows))
            for each in leaves_of(self.result(rows))
            if isinstance(each, torch.Tensor) and each.ndim > 0 and each.shape[0] == len(rows)
        ]
        if not found:
            raise ShapeError(
                f"check_invariant: with {len(rows)} rows no result has a first dimension of {len(rows)}"
            )
        return torch.stack(found, 1)

    def traced(self, rows: tuple[int, ...], keep: Callable[[int, torch.Tensor], Any]) -> _Trace:
        trace = _Trace(keep, self.modules)
        with trace:
            self.result(rows)
        return trace

    def shapes(self, count: int) -> list[tuple[Any, list[Any]]]:
        trace = self.traced(tuple(range(count)), lambda number, tensor: tuple(tensor.shape))
        return [(name, kept) for name, _, kept in trace.found]

    def sums(self, run: Run, other: list[tuple[Any, list[Any]]], of_other: int) -> _Trace:
        """Trace a run, and keep checksums of rows; `other` has the shapes in a batch of another size."""
        places = dict[int, int]()

        def keep(number: int, tensor: torch.Tensor) -> Any:
            at = places[number] = places.get(number, -1) + 1
            shapes = other[number][1] if number < len(other) else []
            shape = shapes[at] if at < len(shapes) else None
            if shape is None or tensor.numel() == 0:
                return None
            if shape == tuple(tensor.shape):
                return "whole", _sums(tensor, 0, 1) if tensor.ndim else _sums(tensor.reshape(1), 0, 1)
            dim = _split_at(tuple(tensor.shape), shape, len(run.rows), of_other)
            return None if dim is None else ("rows", _sums(tensor, dim, len(run.rows)))

        return self.traced(run.rows, keep)


def check_invariant(
    model: Callable[..., Any], make: Callable[[int], Any], *, batches: Sequence[int] = _BATCHES
) -> InvarianceCheck:
    """Run a model with batches of several sizes, and compare the bits of each row.

    The largest batch is made once. Its rows then run in smaller batches, from its beginning and its end, and
    in another order. If bits differ, everything runs again, operation by operation, to name the first that
    differs. The model runs as it is set here: call this inside `tritile.batch_invariant(torch=True)`.

    Args:
        model: a module or a function. Rows are the first dimension of what it takes and returns.
        make: makes the inputs for a number of rows: a tensor, a tuple of arguments, or a dictionary of
            keywords. Tensors whose first dimension is that number are cut into batches, others stay whole.
        batches: how many rows, each at least 1; the largest is the full batch, of at least 2 rows.

    Raises:
        InvalidValueError: `batches` are not as described.
        ShapeError: no input or no result has the rows in its first dimension.

    Examples:
        >>> layer = torch.nn.ReLU()
        >>> bool(tritile.check_invariant(layer, lambda rows: torch.randn(rows, 8)))
        True
    """
    sizes = sorted(set(batches))
    if not sizes or any(not isinstance(each, int) or each < 1 for each in sizes) or sizes[-1] < 2:
        raise InvalidValueError(
            f"check_invariant: batches are {tuple(batches)!r}: expected numbers of rows of at least 1, one "
            "of them at least 2"
        )
    total = sizes[-1]
    with torch.no_grad():
        of = _Model(model, make(total), total)
        everything = Run(tuple(range(total)), f"{total} rows")
        whole = of.outputs(everything.rows)
        runs = [
            Run(everything.rows, f"{total} rows again"),
            Run(everything.rows[::-1], f"{total} rows reversed"),
        ]
        for size in sizes[:-1]:
            words = f"{size} row{'s' if size > 1 else ''}"
            runs.append(Run(everything.rows[:size], words))
            runs.append(Run(everything.rows[total - size :], f"the last {words}"))
        differing = {}
        for run in runs:
            count = int((of.outputs(run.rows) != whole[list(run.rows)]).any(1).sum())
            if count:
                differing[run.name] = count
        if not differing:
            return InvarianceCheck(True, len(runs), {})
        unlike = [run for run in runs if run.name in differing]
        return InvarianceCheck(False, len(runs), differing, *_first(of, everything, unlike))


def _first(of: _Model, everything: Run, runs: list[Run]) -> tuple[str, str, int]:
    """Return the first operation that differs in any of these runs, its module, and how many came before."""
    shapes = {count: of.shapes(count) for count in (1, 2)}
    whole = of.sums(everything, shapes[1], 1).found
    least: tuple[str, str, int] | None = None
    for run in runs:
        other = 2 if len(run.rows) == 1 else 1
        for number, (name, module, kept) in enumerate(of.sums(run, shapes[other], other).found):
            if number >= len(whole) or (least is not None and number >= least[2]):
                break
            pairs = [pair for pair in zip(kept, whole[number][2], strict=False) if None not in pair]
            for (kind, mine), (of_whole, theirs) in pairs:
                wanted = theirs[list(run.rows)] if kind == "rows" else theirs
                if kind == of_whole and not torch.equal(mine, wanted):
                    least = (name, module, number)
                    break
            if least is not None and least[2] == number:
                break
    return least or ("", "", 0)
