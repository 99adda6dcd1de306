"""Replace a layer's weight by 4-bit integers: python examples/quantized_layer.py

A product of few rows takes about as long as reading its weight. A weight of 4 bits has a quarter of the
bytes.
"""

import torch

import tritile

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH, HIDDEN, ROWS = (4096, 14336, 8) if ON_GPU else (128, 96, 5)
GROUP = 64  # columns that share a scale


def size(layer: torch.nn.Module) -> int:
    """Return the bytes of a layer's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in layer.state_dict().values())


def main() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, before = layer(x), size(layer)

        model = torch.nn.Sequential(layer)
        print(tritile.nn.convert(model, "int4", group_size=GROUP))  # in place
        y = model(x)
        error = (y - expected).norm() / expected.norm()
        print(f"{model[0]}: {before} bytes became {size(model)}; error of rounding {error:.1%}")
        assert error < 0.2

        # The same without a module: the weight and the product by hand.
        weight = torch.randn(HIDDEN, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        packed = tritile.quantize(weight, bits=8, group_size=GROUP)
        y = tritile.linear(x, packed)  # a bias may follow; activation and residual are refused
        expected = x @ weight.mT
        error = (y - expected).norm() / expected.norm()
        print(f"{packed}: error of rounding {error:.1%}")
        print(tritile.plan(tritile.linear, x, packed))
        assert error < 0.02


if __name__ == "__main__":
    main()
