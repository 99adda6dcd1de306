"""`tritile.batch_invariant`: the setting, for a `with`, a function or a process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tritile.core.settings import Choosing, choices_of_invariance, is_batch_invariant_torch
from tritile.core.torch_private import WithoutGraphCache, entered_while_traced
from tritile.errors import InvalidValueError
from tritile.invariant import overrides
from tritile.invariant.report import Report, Watch


class _Invariant(Choosing):
    """Choose batch invariance inside a `with`, of torch's own products, too, if that is chosen."""

    def _enter(self, stack: ExitStack) -> None:
        super()._enter(stack)
        if is_batch_invariant_torch():
            overrides.install()
        stack.enter_context(WithoutGraphCache())
        stack.enter_context(entered_while_traced())


def batch_invariant(on: bool = True, *, torch: bool | None = None) -> Choosing:
    """Make products inside a `with` batch-invariant: a row has the same result whatever rows come with it.

    It also works as a decorator. Each element of a result then depends, bit for bit, only on its row of the
    first operand, its column of the second, what is added to it, and the model of GPU. It does not depend on
    the number of rows, on the row's place among them, on alignment, or on what else the GPU does. This holds
    for `matmul`, `linear` (also with quantized weights), `addmm`, `baddbmm`, `gated_linear`, `scaled_matmul`
    and `grouped_matmul`, between calls with the same dtypes, precision, activation and kinds of operands, in
    the same versions of tritile and Triton. Sums are made in the same order for any number of rows (see
    `families.numerics`), so some calls are slower, those with few rows most. Permutations only move bits, and
    do not change.

    With `torch=True` the products of torch itself are made so, too, on CUDA, in fp16, bf16, fp32 and fp64:
    `torch.mm`, `addmm`, `bmm`, `baddbmm`, `mv`, `addmv`, `dot`, `addbmm`, `F.linear`, `torch.matmul`,
    `einsum` and what else is made of these, `_scaled_mm` and grouped products where tritile has them, and
    their derivatives. So whole models run unchanged, also under `torch.compile`, which keeps graphs made
    inside and outside apart. Other operations that sum (attention, norms, means) are torch's:
    `tritile.batch_invariant.report()` lists those that ran, and `tritile.check_invariant` finds the first one
    whose bits differ. tritile's kernels are registered with torch's dispatcher on first use; from then on a
    product of torch's passes through Python, outside as well, where its kernels and bits are torch's.

    The choice applies to the current thread or task, and to the backward passes of products made inside.
    Products that torch makes in a backward pass for anything else, such as a forward pass that
    `torch.utils.checkpoint` recomputes, follow the call of `backward`: call it inside, too.
    `TRITILE_BATCH_INVARIANT=1` sets it for a process, and `=torch` with torch's products.

    Args:
        on: False turns it off again.
        torch: True takes torch's own products in, False leaves them to torch. None keeps the current choice.

    Inside, these calls of tritile's raise UnsupportedError: precision "fp16x3", because the data decide how
    it multiplies; complex products, because torch computes them; and on Hopper and later, "tf32" into an
    `out` whose rows are not contiguous. torch's own calls that tritile does not make are torch's, and
    reported.

    Raises:
        InvalidValueError: `on` or `torch` is neither True nor False.

    Examples:
        >>> with tritile.batch_invariant(torch=True):
        ...     logits = torch.nn.Linear(300, 77, device="cuda")(torch.ones(5, 300, device="cuda"))
    """
    for name, value in (("on", on), ("torch", torch)):
        if not isinstance(value, bool) and not (name == "torch" and value is None):
            raise InvalidValueError(f"batch_invariant: {name} is {value!r}: expected True or False")
    return _Invariant(*choices_of_invariance(on, torch))


@contextmanager
def report() -> Iterator[Report]:
    """List the operations that run inside the `with` and are not batch-invariant.

    The `with` is also one of `tritile.batch_invariant(torch=True)`. Products that tritile makes, elementwise
    operations, and those that only move, choose or compare elements are batch-invariant. All others are
    listed, whether or not their kernels happen to be: `tritile.check_invariant` compares bits. Products on
    the host are listed, too; elementwise operations there may round differently at the end of a vector.
    Inside, torch calls each operation one by one, slowly, and runs compiled models as they are written. It
    sees this thread and its backward passes.

    Yields:
        A `Report`, complete at the end of the `with`.

    Examples:
        >>> with tritile.batch_invariant.report() as found:
        ...     y = torch.softmax(torch.ones(3, 4), -1)
        >>> [each.name for each in found.operations]
        ['aten::_softmax']
    """
    found = Report()
    with batch_invariant(torch=True), torch.compiler.set_stance("force_eager"), Watch(found):
        yield found


batch_invariant.report = report  # type: ignore[attr-defined]
