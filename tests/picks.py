"""What runs for 40 named calls, on an H200 and on an H100: tests/picks.toml.

    python tests/picks.py     plan them all, and rewrite the file

A commit that changes picks on purpose rewrites the file, and says in its message why. To add a call, write
its name and `call` into the file first. `bf16[2, 3]` in a call is a contiguous tensor of that shape, and
`int4[2, 3]` a weight packed in groups of 128. Picks hold for the version of Triton that the file names.
"""

import functools
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("picks.toml")
GPUS = "h200", "h100"  # those with a measured table
OPERATIONS = (
    "matmul", "bmm", "addmm", "linear", "gated_linear", "grouped_matmul", "scaled_matmul", "transpose",
    "permute",
)  # fmt: skip

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for _name in [name for name in os.environ if name.startswith("TRITILE_")]:
        del os.environ[_name]

import torch  # noqa: E402
import triton  # noqa: E402

import tritile  # noqa: E402

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8, "int32": torch.int32,
    "complex128": torch.complex128,
}  # fmt: skip


class Shaped:
    """`shaped[2, 3]` is what `make` makes of (2, 3)."""

    def __init__(self, make: Callable[[tuple[int, ...]], Any]) -> None:
        self.make = make

    def __getitem__(self, shape: int | tuple[int, ...]) -> Any:
        return self.make(shape if isinstance(shape, tuple) else (shape,))


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _packed(shape: tuple[int, ...]) -> tritile.QuantizedWeight:
    return tritile.quantize(_empty(torch.bfloat16, shape), bits=4, group_size=128)


OPERANDS = {name: Shaped(functools.partial(_empty, dtype)) for name, dtype in DTYPES.items()}
OPERANDS["int4"] = Shaped(_packed)


def plan(call: str, device: tritile.Device) -> tritile.Plan:
    """The plan of a call written as in the file, which may have `invariant=True` as well."""

    def planned(op: str, *args: Any, invariant: bool = False, **kwargs: Any) -> tritile.Plan:
        with tritile.batch_invariant(invariant):
            return tritile.plan(op, *args, device=device, **kwargs)

    return eval(call, OPERANDS | {op: functools.partial(planned, op) for op in OPERATIONS})


def calls() -> dict[str, str]:
    """The calls of the file by name."""
    found = tomllib.loads(FILE.read_text())
    return {name: row["call"] for name, row in found.items() if name != "triton"}


def plans() -> Iterator[tuple[str, str, list[tritile.Plan]]]:
    """Yield each name, its call and what is planned for it on each of GPUS, torch's own kernel included."""
    devices = [tritile.target_device(gpu) for gpu in GPUS]
    for name, call in calls().items():
        with tritile.mode("cached", backends="triton,aten"):
            yield name, call, [plan(call, device) for device in devices]


def _pick(found: tritile.Plan) -> str:
    return f"{found.source}: {'aten' if found.config.family == 'aten' else found.config}"


def text() -> str:
    """The file as it should be now."""
    lines = [f'triton = "{triton.__version__}"']
    for name, call, found in plans():
        row = {"call": call} | {gpu: _pick(one) for gpu, one in zip(GPUS, found, strict=True)}
        lines += ["", f"[{json.dumps(name)}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in row.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITILE_CACHE_DIR"] = empty  # nothing that was tuned on this machine
        FILE.write_text(text())
