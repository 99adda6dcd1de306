"""Route tokens to experts and multiply them all by grouped_matmul: python examples/mixture_of_experts.py

Only the GPU knows how many tokens each expert gets. `offs`, where each expert's rows end, stays there, and
the host never waits for it.
"""

import torch
from torch import Tensor

import tritile

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = (4099, 2048, 1408, 64, 6) if ON_GPU else (21, 32, 48, 4, 2)


def experts(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return (tokens, width): for each token the weighted sum of what its experts compute.

    router is (width, experts), gate and up are (experts, width, hidden), down is (experts, hidden, width).
    """
    weights, expert = (x @ router).float().softmax(-1).topk(CHOSEN)  # (tokens, chosen) each
    order = expert.flatten().argsort(stable=True)  # rows of one expert lie together
    token = order // CHOSEN
    offs = expert.flatten().bincount(minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    rows = x[token]
    hidden = torch.nn.functional.silu(tritile.grouped_matmul(rows, gate, offs))
    y = tritile.grouped_matmul(hidden * tritile.grouped_matmul(rows, up, offs), down, offs)
    y = y.float() * weights.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, y).to(x.dtype)


def one_by_one(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the same by a loop over the experts, in fp32."""
    weights, expert = (x @ router).float().softmax(-1).topk(CHOSEN)
    out = torch.zeros_like(x, dtype=torch.float32)
    for index in range(EXPERTS):
        token, slot = (expert == index).nonzero(as_tuple=True)
        rows = x[token].float()
        hidden = torch.nn.functional.silu(rows @ gate[index].float()) * (rows @ up[index].float())
        out.index_add_(0, token, hidden @ down[index].float() * weights[token, slot, None])
    return out


def main() -> None:
    torch.manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=DEVICE) / shape[-2] ** 0.5).to(torch.bfloat16)

    x = torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    router = weight(WIDTH, EXPERTS)
    gate, up = weight(EXPERTS, WIDTH, HIDDEN), weight(EXPERTS, WIDTH, HIDDEN)
    down = weight(EXPERTS, HIDDEN, WIDTH)

    y = experts(x, router, gate, up, down)
    expected = one_by_one(x, router, gate, up, down)
    error = (y.float() - expected).norm() / expected.norm()
    print(f"{TOKENS} tokens, {CHOSEN} of {EXPERTS} experts each: relative error {error:.1e}")
    rows = x.repeat_interleave(CHOSEN, 0)
    offs = torch.linspace(len(rows) // EXPERTS, len(rows), EXPERTS, device=DEVICE).to(torch.int32)
    print(tritile.plan(tritile.grouped_matmul, rows, gate, offs))
    assert error < 0.02


if __name__ == "__main__":
    main()
