"""Train a Llama-like model whose layers tritile multiplies where it is faster: python examples/llama.py

On a GPU tritile and torch are measured at the layers that one step calls (mode "tune"). On a CPU predictions
for an H200 decide, and layers as small as these stay torch's.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import tritile

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# An odd vocabulary: tritile gains most at such a head.
VOCABULARY, TOKENS, WIDTH, HIDDEN, HEADS, LAYERS = (
    (50257, 1501, 2048, 5632, 16, 4) if ON_GPU else (97, 13, 32, 80, 4, 2)
)


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of elements of (..., tokens, width) by their position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] / 10000 ** (
        torch.arange(half, device=x.device) / half
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_hidden = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-2, -4).unbind(-2)
        y = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(-2, -3).flatten(-2))
        y = self.norm_hidden(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def main() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(embedding, *(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH), head)
    model.to(DEVICE, torch.bfloat16)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), device=DEVICE)

    def step() -> float:
        model.zero_grad()
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    expected = step()
    with tritile.mode("tune"):
        print(tritile.nn.convert(model, forward=step, device=None if ON_GPU else "nvidia-h200"))
    loss = step()
    print(f"loss by torch {expected:.4f}, converted {loss:.4f}")
    assert abs(loss - expected) < 0.02 * expected
    if restored := tritile.nn.restore(model):
        print(f"{restored} layers are torch's again")
    else:
        print("no layer was converted: the table has the reasons")


if __name__ == "__main__":
    main()
