"""Tune a kernel of your own, a residual and RMSNorm in one launch: python examples/rms_norm.py

On a GPU the first call searches once, and every later process runs the winner. Without one, start it with
TRITON_INTERPRET=1: Triton's interpreter then runs the first config, and nothing is measured. Either way the
answer is compared with `expected`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

import tritile

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, WIDTH = (8191, 5120) if ON_GPU else (5, 300)
EPS = 1e-6


def expected(x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return what the kernel writes: both outputs by name."""
    total = (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return {"total": total, "out": (norm * weight.float()).to(x.dtype)}


@tritile.autotune(
    tritile.Space({"TILE": (1, 2, 4), "BLOCK": (256, 512, 1024, 2048), "num_warps": (2, 4, 8)}),
    key=["width"],  # a new width is searched anew; any number of rows runs its winner
    reference=expected,
)
@triton.jit
def add_rms_norm(
    x, residual, weight, total, out, rows, width, eps,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """total = x + residual; out = total / rms(total) * weight, TILE rows a program; all row-major."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    squares = tl.zeros((TILE, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
        mask = (row < rows) & (column < width)
        at = row * width + column
        added = tl.load(x + at, mask, 0.0).to(tl.float32) + tl.load(residual + at, mask, 0.0).to(tl.float32)
        added = added.to(total.dtype.element_ty)
        tl.store(total + at, added, mask)
        squares += added.to(tl.float32) * added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / width + eps)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = (row < rows) & (column < width)
        at = row * width + column
        added = tl.load(x + at, mask, 0.0).to(tl.float32) + tl.load(residual + at, mask, 0.0).to(tl.float32)
        added = added.to(total.dtype.element_ty).to(tl.float32)
        y = added * scale * tl.load(weight + column, column < width, 0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask)


def main() -> None:
    if not ON_GPU and not triton.knobs.runtime.interpret:
        raise SystemExit("no GPU here: set TRITON_INTERPRET=1 to run the kernel in Triton's interpreter")
    torch.manual_seed(0)
    x, residual = torch.randn(2, ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.rand(WIDTH, device=DEVICE, dtype=torch.bfloat16)
    total, out = torch.empty_like(x), torch.empty_like(x)

    def grid(config: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(ROWS, config["TILE"]),)

    add_rms_norm[grid](x, residual, weight, total, out, ROWS, WIDTH, EPS)
    print(f"{ROWS}x{WIDTH} runs with {add_rms_norm.best_config}")
    for name, right in expected(x, residual, weight).items():
        torch.testing.assert_close({"total": total, "out": out}[name], right, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    main()
