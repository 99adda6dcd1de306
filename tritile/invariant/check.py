"""`tritile.check_invariant`: run a model with several batches, and find the first operation that differs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tritile.core.markup import Tabular
from tritile.core.torch_private import OpOverload, TorchDispatchMode, leaves_of, map_leaves
from tritile.errors import InvalidValueError, ShapeError, UnsupportedError

_BATCHES: Final = (1, 2, 7, 64)
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """Return a checksum of the bits of each of `count` parts of a dimension.

    Words are multiplied by numbers of 64 random bits, and sums are exact, modulo 2^64. The numbers are those
    of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014), as in SplitMix64.
    """
    parts = tensor.detach().resolve_conj().resolve_neg().movedim(dim, 0).reshape(count, -1).contiguous()
    words = parts.view(_WORDS[min(8, parts.element_size())]).reshape(count, -1).long()
    weights = torch.arange(1, words.shape[1] + 1, device=words.device) * -7046029254386353131
    weights = (weights ^ (weights >> 30)) * -4658895280553007687
    weights = (weights ^ (weights >> 27)) * -7723592293110705685
    return (words * (weights | 1)).sum(1)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


class Made(NamedTuple):
    """A tensor that an operation made in a batch of `rows`: its shape, and checksums by dimension.

    A dimension that may hold the rows has a checksum of each row, None stands for the whole tensor.
    """

    rows: int
    shape: tuple[int, ...]
    sums: dict[int | None, torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: int) -> "Made":
        sums: dict[int | None, torch.Tensor] = {None: _sums(tensor.reshape(-1), 0, 1)}
        for dim, size in enumerate(tensor.shape):
            if size % rows == 0:
                sums[dim] = _sums(tensor, dim, rows)
        return cls(rows, tuple(tensor.shape), sums)

    def differs(self, whole: "Made", places: tuple[int, ...]) -> bool:
        """True if bits differ from those of the same rows in the full batch, as far as rows are found."""
        if len(self.shape) != len(whole.shape):
            return False
        unlike = [dim for dim, size in enumerate(self.shape) if size != whole.shape[dim]]
        if not unlike and self.rows == whole.rows:  # in another order, perhaps
            dims = [dim for dim in self.sums if dim is not None and dim in whole.sums]
            found = [torch.equal(self.sums[dim], whole.sums[dim][list(places)]) for dim in dims]
            return not any([*found, torch.equal(self.sums[None], whole.sums[None])])
        if not unlike:
            return not torch.equal(self.sums[None], whole.sums[None])
        if len(unlike) > 1 or self.shape[unlike[0]] * whole.rows != whole.shape[unlike[0]] * self.rows:
            return False
        (dim,) = unlike
        return not torch.equal(self.sums[dim], whole.sums[dim][list(places)])


class _Trace(TorchDispatchMode):
    """Note each operation: its name, its module, and what it made."""

    supports_higher_order_operators = True

    def __init__(self, rows: int, modules: dict[int, str]) -> None:
        super().__init__()
        self.found: list[tuple[str, str, list[Made]]] = []
        self._rows, self._modules, self._within = rows, modules, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_operator = isinstance(func, OpOverload)
        name = func.name() if is_operator else str(func)
        if not (is_operator and func.is_view) and "empty" not in name:  # which holds whatever was there
            made = [
                Made.of(each, self._rows) for each in leaves_of(result) if _is_plain(each) and each.numel()
            ]
            self.found.append((name, self._within[-1] if self._within else "", made))
        return result

    def __enter__(self) -> "_Trace":
        self._hooks = ExitStack()
        enter = register_module_forward_pre_hook(lambda module, args: self._within.append(self._name(module)))
        leave = register_module_forward_hook(self._leave, always_call=True)
        for hook in (enter, leave):
            self._hooks.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._within.pop()

    def _name(self, module: torch.nn.Module) -> str:
        return self._modules.get(id(module)) or type(module).__name__


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

        inputs = map_leaves(cut, self.inputs)
        return self.function(**inputs) if isinstance(inputs, dict) else self.function(*inputs)

    def outputs(self, rows: tuple[int, ...]) -> torch.Tensor:
        """Return a checksum of each row of all results."""
        found = []
        for each in leaves_of(self.result(rows)):
            if not isinstance(each, torch.Tensor):
                continue
            if not _is_plain(each):
                raise UnsupportedError(
                    "check_invariant: a result is sparse or nested: expected plain tensors"
                )
            if each.ndim > 0 and each.shape[0] == len(rows):
                found.append(_sums(each, 0, len(rows)))
        if not found:
            raise ShapeError(
                f"check_invariant: with {len(rows)} rows no result has a first dimension of {len(rows)}"
            )
        return torch.stack(found, 1)

    def traced(self, rows: tuple[int, ...]) -> list[tuple[str, str, list[Made]]]:
        trace = _Trace(len(rows), self.modules)
        with torch.compiler.set_stance("force_eager"), trace:
            self.result(rows)
        return trace.found


def check_invariant(
    model: Callable[..., Any], make: Callable[[int], Any], *, batches: Sequence[int] = _BATCHES
) -> InvarianceCheck:
    """Run a model with batches of several sizes, and compare the bits of each row.

    The largest batch is made once. Its rows then run in smaller batches, from its beginning and its end, and
    in another order. If bits differ, all runs are repeated, operation by operation, to name the first that
    differs. The model runs as it is set here: call this inside `tritile.batch_invariant(torch=True)`.

    Args:
        model: a module or a function. Rows are the first dimension of what it takes and returns.
        make: makes the inputs for a number of rows: a tensor, a tuple of arguments, or a dictionary of
            keywords. Tensors whose first dimension is that number are cut into batches, others stay whole.
        batches: how many rows, each at least 1; the largest is the full batch, of at least 2 rows.

    Raises:
        InvalidValueError: `batches` are not as described.
        ShapeError: no input or no result has the rows in its first dimension.
        UnsupportedError: a result is a sparse or nested tensor.

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
        full = Run(tuple(range(total)), f"{total} rows")
        whole = of.outputs(full.rows)
        runs = [
            Run(full.rows, f"{total} rows again"),
            Run(full.rows[::-1], f"{total} rows reversed"),
        ]
        for size in sizes[:-1]:
            words = f"{size} row{'s' if size > 1 else ''}"
            runs.append(Run(full.rows[:size], words))
            runs.append(Run(full.rows[total - size :], f"the last {words}"))
        differing = {}
        for run in runs:
            count = int((of.outputs(run.rows) != whole[list(run.rows)]).any(1).sum())
            if count:
                differing[run.name] = count
        if not differing:
            return InvarianceCheck(True, len(runs), {})
        unlike = [run for run in runs if run.name in differing]
        return InvarianceCheck(False, len(runs), differing, *_first(of, full, unlike))


def _first(of: _Model, full: Run, runs: list[Run]) -> tuple[str, str, int]:
    """Return the first operation that differs in any of these runs, its module, and how many came before.

    Batches may run different operations: those of one name that follow each other alike are compared.
    """
    whole = of.traced(full.rows)
    names = [name for name, *_ in whole]
    first: tuple[str, str, int] | None = None
    for run in runs:
        mine = of.traced(run.rows)
        blocks = SequenceMatcher(
            None, [name for name, *_ in mine], names, autojunk=False
        ).get_matching_blocks()
        for start, begin, count in blocks:
            for (name, module, made), (number, (_, _, wholly)) in zip(
                mine[start : start + count], enumerate(whole[begin : begin + count], begin), strict=True
            ):
                if first is not None and number >= first[2]:
                    break
                if any(one.differs(other, run.rows) for one, other in zip(made, wholly, strict=False)):
                    first = name, module, number
    return first or ("", "", 0)
