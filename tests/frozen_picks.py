"""Part of the frozen baseline: calls drawn from a seed, and what `tritile.plan` picks for each on a GPU."""

import random
from collections.abc import Iterator
from typing import Any

import torch

import tritile

GPUS = "h200", "h100"  # those with a measured table
COUNT = 2000  # calls
SEED = 20

ROUND = 128, 256, 512, 768, 1024, 2048, 3072, 4096, 6144, 8192, 14336, 16384, 28672
LLAMA = (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (8192, 8192)
HALVES = torch.bfloat16, torch.bfloat16, torch.float16
FP8 = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATIONS = None, "relu", "gelu", "gelu_tanh", "silu"
GONE = "gone"  # as a precision: drawn, so that other draws stay those that are frozen, and left out
PRECISIONS = {
    torch.float32: (None, "ieee", GONE, "tf32", *["fp16x3"] * 8),
    torch.float64: ("ieee", GONE),
    torch.complex64: (GONE,),
    torch.complex128: (GONE,),
}
# Of a hundred calls. Those without a portfolio are few: each takes 0.1 s and more to rank every legal config.
OPERATIONS = {
    "matmul": 25, "mm": 6, "bmm": 8, "broadcast": 3, "vector": 2, "addmm": 4, "baddbmm": 3, "linear": 10,
    "gated_linear": 4, "grouped_matmul": 2, "scaled_matmul": 3, "quantized": 10, "permute": 9, "transpose": 8,
    "contiguous": 3,
}  # fmt: skip


Made = tuple[str, list[Any], dict[str, Any]]
Call = tuple[str, list[Any], dict[str, Any], bool]


class Drawing(random.Random):
    """Draws by `random()` alone, whose sequence Python keeps from version to version."""

    def one(self, options: Any) -> Any:
        return options[int(self.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        """A whole number, its logarithm uniform."""
        return min(high, int(low * ((high + 1) / low) ** self.random()))

    def often(self, share: float) -> bool:
        return self.random() < share

    def size(self, high: int = 16384) -> int:
        kind = self.random()
        if kind < 0.35:
            return self.one([size for size in ROUND if size <= high])
        if kind < 0.6:
            return 8 * self.between(2, high // 8)
        return self.between(17, high)


def tensor(draw: Drawing, *shape: int, dtype: torch.dtype, column: bool = False, odd: float = 0.1) -> Any:
    """A tensor on the meta device; the share `odd` of them have padded rows or start off 16 bytes."""
    *batch, rows, columns = shape if not column else (*shape[:-2], shape[-1], shape[-2])
    padded, offset = columns, 0
    if draw.often(odd):
        padded, offset = columns + draw.one((0, 1, 8)), draw.one((0, 1, 4))
    strides = [padded, 1]
    for size in reversed([*batch[1:], rows] if batch else []):
        strides.insert(0, strides[0] * size)
    size = offset + (strides[0] * (batch[0] if batch else rows))
    base = torch.empty(size, dtype=dtype, device="meta")
    found = base.as_strided((*batch, rows, columns), strides, offset)
    return found.mT if column else found


def sizes(draw: Drawing) -> tuple[int, int, int]:
    """M, N and K: squares, products of models, few rows, deep and any."""
    kind = draw.random()
    if kind < 0.15:
        return (draw.one(ROUND[:10]),) * 3
    if kind < 0.4:
        n, k = draw.one(LLAMA)
        return draw.one((1, 2, 4, 8, 16, 64, 256, 1024, 4096, 8192)), n, k
    if kind < 0.5:
        return draw.between(1, 16), draw.size(), draw.size()
    if kind < 0.55:
        return draw.between(17, 512), draw.between(17, 512), draw.size(65536)
    return draw.size(), draw.size(), draw.size(8192)


def dtype_and_precision(draw: Drawing, complexes: bool = True) -> tuple[torch.dtype, str | None]:
    kind = draw.random()
    if kind < 0.92:
        return draw.one(HALVES), None
    if kind < 0.96 or not complexes:
        return torch.float32, draw.one(PRECISIONS[torch.float32])
    if kind < 0.985:
        return (draw.one(FP8), draw.one((None, "fast"))) if draw.often(0.7) else (torch.int8, None)
    dtype = draw.one((torch.float64, torch.complex64, torch.complex64, torch.complex128))
    return dtype, draw.one(PRECISIONS[dtype])


def _matmul(draw: Drawing, name: str) -> Made:
    (m, n, k), (dtype, precision) = sizes(draw), dtype_and_precision(draw)
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    if name in ("bmm", "broadcast"):
        batch = draw.between(2, 64)
        m, n, k = min(m, 2048), min(n, 2048), min(k, 2048)
        a_batch, b_batch = (
            (batch,),
            (batch,) if name == "bmm" else draw.one([(), (1,), (draw.between(2, 4), 1)]),
        )
    a = tensor(draw, *a_batch, m, k, dtype=dtype, column=draw.often(0.15))
    b = tensor(draw, *b_batch, k, n, dtype=dtype, column=draw.often(0.5))
    if name == "vector":
        a, b = (a, b[:, 0]) if draw.often(0.5) else (a[0], b)
    words: dict[str, Any] = {"precision": precision}
    if dtype in HALVES and draw.often(0.1):
        words["out_dtype"] = torch.float32
    if name in ("matmul", "mm") and dtype in HALVES and draw.often(0.1):
        words["out"] = tensor(
            draw, m, n, dtype=words.get("out_dtype", dtype), column=draw.often(0.6), odd=0.5
        )
    return "matmul" if name in ("broadcast", "vector") else name, [a, b], words


def _added(draw: Drawing, name: str) -> Made:
    (m, n, k), (dtype, precision) = sizes(draw), dtype_and_precision(draw, complexes=False)
    batch = () if name == "addmm" else (draw.between(2, 64),)
    m, n, k = (m, n, k) if name == "addmm" else (min(m, 2048), min(n, 2048), min(k, 2048))
    shape = draw.one([(*batch, m, n), (n,), (m, 1)] if name == "addmm" else [(*batch, m, n)])
    words = {"precision": precision} | draw.one(({}, {"alpha": 2.0}, {"beta": 0.5, "alpha": 1.5}))
    if draw.often(0.2):
        words["activation"] = draw.one(ACTIVATIONS)
    added = torch.empty(shape, dtype=dtype, device="meta")
    a = tensor(draw, *batch, m, k, dtype=dtype, column=draw.often(0.15))
    return name, [added, a, tensor(draw, *batch, k, n, dtype=dtype, column=draw.often(0.4))], words


def _linear(draw: Drawing, name: str) -> Made:
    (m, n, k), (dtype, precision) = sizes(draw), dtype_and_precision(draw, complexes=False)
    x, words = tensor(draw, m, k, dtype=dtype), {"precision": precision}
    activation = draw.one(ACTIVATIONS)
    if name == "gated_linear":
        if precision == "fp16x3":
            words["precision"] = "tf32"
        weights = [tensor(draw, n, k, dtype=dtype, odd=0.05) for _ in range(2)]
        if draw.often(0.3):
            words |= {f"bias_{of}": torch.empty(n, dtype=dtype, device="meta") for of in ("gate", "up")}
        return name, [x, *weights], words | {"activation": activation}
    words["activation"] = activation
    if draw.often(0.5):
        words["bias"] = torch.empty(n, dtype=dtype, device="meta")
    if draw.often(0.3):
        words["residual"] = tensor(draw, m, n, dtype=dtype)
    return name, [x, tensor(draw, n, k, dtype=dtype)], words


def _grouped(draw: Drawing, name: str) -> Made:
    (m, n, k), groups = sizes(draw), draw.one((2, 8, 16, 64))
    n, k = min(n, 8192), min(k, 8192)
    dtype = draw.one((*HALVES, torch.float32, torch.float8_e4m3fn))
    offs = torch.empty(groups, dtype=torch.int32, device="meta")
    ragged = draw.one("mmmnk3")
    if ragged == "m":
        operands = [(m, k), (groups, k, n)]
    elif ragged == "n":
        operands = [(groups, m, k), (k, n)]
    elif ragged == "k":
        operands = [(m, k), (k, n)]
    else:
        operands = [(groups, min(m, 2048), k), (groups, k, n)]
    columns = (ragged == "k", draw.often(0.6))
    a, b = (tensor(draw, *s, dtype=dtype, column=c, odd=0.05) for s, c in zip(operands, columns, strict=True))
    gone = ragged == "k" or (ragged in "mn" and dtype == torch.float8_e4m3fn)
    return name, [a, b, *([] if ragged == "3" else [offs])], {"precision": GONE} if gone else {}


def _scaled(draw: Drawing, name: str) -> Made:
    (m, n, k), integers = sizes(draw), draw.often(0.25)
    if draw.often(0.7):
        n, k = -(-n // 16) * 16, -(-k // 16) * 16
    kinds = (torch.int8, torch.int8) if integers else (draw.one(FP8), draw.one(FP8))
    blocks = -(-k // 128)
    shapes = [((1,), (1,)), ((m, 1), (1, n)), ((m, 1), (1,))]
    if draw.often(0.3) and not integers:
        shapes = [((m, blocks), (blocks, -(-n // 128))), ((m, blocks), (blocks, n))]
    scales = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in draw.one(shapes)]
    one_of_k = all(
        scale.numel() == 1 or scale.numel() == size for scale, size in zip(scales, (m, n), strict=True)
    )
    words: dict[str, Any] = {} if one_of_k else {"precision": GONE}
    if not integers and draw.often(0.2):
        words["use_fast_accum"] = True
    if draw.often(0.3):
        words["bias"] = torch.empty(n, dtype=torch.bfloat16, device="meta")
    if integers:
        draw.often(0.3)  # read by nothing: the draws after it stay those that are frozen
    if draw.often(0.3):
        words["out_dtype"] = draw.one((torch.float32, torch.float16))
    a = tensor(draw, m, k, dtype=kinds[0], odd=0.05)
    return name, [a, tensor(draw, k, n, dtype=kinds[1], column=draw.often(0.9), odd=0.05), *scales], words


def _quantized(draw: Drawing, name: str) -> Made:
    (m, n, k), dtype = sizes(draw), draw.one(HALVES)
    how = {
        "bits": draw.one((4, 4, 8)),
        "group_size": draw.one((32, 64, 128, 128)),
        "zero_points": draw.often(0.3),
    }
    weight = tritile.quantize(torch.empty(n, k, dtype=dtype, device="meta"), **how)
    bias = [torch.empty(n, dtype=dtype, device="meta")] if draw.often(0.3) else []
    return "linear", [tensor(draw, m, k, dtype=dtype), weight, *bias], {}


def _moved(draw: Drawing, name: str) -> Made:
    dtype = draw.one(
        (torch.uint8, torch.bfloat16, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
    )
    if name == "transpose":
        batch = (draw.between(2, 64),) if draw.often(0.3) else ()
        rows, columns = (
            (draw.one((1024, 4096, 8192)),) * 2 if draw.often(0.3) else (draw.size(8192), draw.size(8192))
        )
        return name, [tensor(draw, *batch, rows, columns, dtype=dtype)], {}
    if name == "contiguous":
        x = tensor(draw, draw.size(8192), draw.size(8192), dtype=dtype)
        return name, [draw.one((x.mT, x[::2, 1:], x[:, ::2], x[:-1, :-1]))], {}
    rank = draw.one((3, 3, 4, 5))
    shape = [draw.between(2, int(2e8 ** (1 / rank))) for _ in range(rank)]
    dims = sorted(range(rank), key=lambda _: draw.random())
    return name, [torch.empty(shape, dtype=dtype, device="meta"), tuple(dims)], {}


_DRAWN = {
    **dict.fromkeys(("matmul", "mm", "bmm", "broadcast", "vector"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    **dict.fromkeys(("linear", "gated_linear"), _linear),
    "grouped_matmul": _grouped,
    "scaled_matmul": _scaled,
    "quantized": _quantized,
    **dict.fromkeys(("permute", "transpose", "contiguous"), _moved),
}


def calls(count: int = COUNT) -> Iterator[Call]:
    """Yield drawn calls, no two alike: operation, arguments, those by name, whether it is batch-invariant."""
    draw, seen = Drawing(SEED), set()
    names = [name for name, share in OPERATIONS.items() for _ in range(share)]
    while len(seen) < count:
        name = draw.one(names)
        call = (*_DRAWN[name](draw, name), draw.often(0.06))
        if label(call) not in seen:
            seen.add(label(call))
            if call[2].get("precision") != GONE:
                yield call


def _text(value: Any) -> str:
    if isinstance(value, tritile.QuantizedWeight):
        n, k = value.shape
        return f"int{value.bits}/{value.group_size}{'+zeros' * (value.zeros is not None)}[{n}x{k}]"
    if not isinstance(value, torch.Tensor):
        return str(value).removeprefix("torch.")
    shape, strides = ("x".join(map(str, sizes)) for sizes in (value.shape, value.stride()))
    offset = value.storage_offset()
    return (
        f"{str(value.dtype).removeprefix('torch.')}[{shape} by {strides}{f' from {offset}' * (offset > 0)}]"
    )


def label(call: Call) -> str:
    """The call in one line, from nothing but its arguments."""
    name, args, words, invariant = call
    named = [f"{word}={_text(value)}" for word, value in words.items() if value is not None]
    return " ".join([name, *map(_text, args), *named, *["invariant"] * invariant])


def pick(call: Call, device: Any) -> str:
    """What is planned, "source: config"; or the name of the error that refuses the call."""
    name, args, words, invariant = call
    try:
        with tritile.mode("cached"), tritile.batch_invariant(invariant):
            plan = tritile.plan(name, *args, device=device, **words)
    except tritile.TritileError as error:
        return f"refused: {type(error).__name__}"
    return f"{plan.source}: {plan.config}"
