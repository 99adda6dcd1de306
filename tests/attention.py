"""torch's attention, forward and backward, with its products made by something else."""

import torch

FP64 = torch.float64


def assert_attention(switched, device: str = "cpu") -> None:
    """Within `switched`, a context that gives a report, nn.MultiheadAttention does as without it, in fp64.

    A product over K errs by 4 sqrt(K) + 1 eps of |a| |b| in norm, and what goes on from there multiplies that
    by the norms of the other operands: the error of 24 products is within 24 times that of the product of all
    norms, twice as much for torch's own errors. Softmax and its derivative stretch by 2 at the most.
    """
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=FP64, device=device)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).to(device, FP64)

    def run():
        given = x.clone().requires_grad_()
        layer.zero_grad()
        out, _ = layer(given, given, given)
        out.square().sum().backward()
        return [out.detach(), given.grad, *[p.grad.clone() for p in layer.parameters()]]

    like = run()
    with switched as report:
        got = run()
    assert report.taken >= 12
    norms = [t.norm().clamp(min=1) for t in (x, x, x, like[0], *[p.detach() for p in layer.parameters()])]
    bound = 2 * 4 * 24 * (4 * 8**0.5 + 1) * torch.finfo(FP64).eps * torch.stack(norms).prod()
    assert bound < 1e-6  # a term left out is some 1e-2
    assert max(float((a - b).abs().max()) for a, b in zip(got, like, strict=True)) <= bound
