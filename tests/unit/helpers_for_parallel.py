"""What each rank of test_parallel does, in a process of its own; each check is made there.

All numbers are whole and small, so that sums are exact in fp32 in any order: one device's answers come out.
"""

import os

import torch
from torch import distributed, nn
from torch.nn import functional as F

import tritile

RANKS = 2
WORKS = ["mlp", "attention", "operators", "few_bits", "two_dimensions", "fully_sharded"]


def whole(*shape, seed=0, most=2, device="cpu"):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-most, most + 1, shape, generator=generator).float().to(device)


def whole_weights(model):
    """The same model, its parameters whole numbers of at most 1."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=seed, most=1))
    return model


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, made, width=8):
        super().__init__()
        self.up, self.down = made(6, width), made(width, 6)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Attention(nn.Module):
    """Heads of 2, as many as the layers hold; weights by relu, which keeps numbers whole."""

    def __init__(self, made, matmul=torch.matmul):
        super().__init__()
        self.q, self.k, self.v, self.out = (made(8, 8, False) for _ in range(4))
        self.matmul = matmul

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = self.matmul(F.relu(self.matmul(q, k.mT)), v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def steps(model, x):
    """The result, and gradients of the input and the parameters by name, full ones."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(whole(*out.shape, seed=5, device=str(x.device)))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    full = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}
    return {"out": out.detach(), "x": x.grad} | full


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), f"{name} on rank {distributed.get_rank()}"


def parallelized(model, mesh, across, along, local=True):
    """The layers named spread by columns, and by rows; between them are local tensors, or spread ones."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel(use_local_output=local) for name in across} | {
        name: RowwiseParallel() for name in along
    }
    return parallelize_module(model, mesh, plan)


def mlp(mesh, device):
    for width, local in ((8, True), (8, False), (5, False)):  # of 5 one rank has 3 and the other 2
        wanted = steps(whole_weights(Mlp(nn.Linear, width)).to(device), whole(2, 3, 6, device=device))
        model = whole_weights(Mlp(tritile.nn.Linear, width)).to(device)
        parallelized(model, mesh, ["up"], ["down"], local)
        assert model.up.weight.to_local().shape[0] < width
        assert_same(steps(model, whole(2, 3, 6, device=device)), wanted)


def attention(mesh, device):
    wanted = steps(whole_weights(Attention(nn.Linear)).to(device), whole(2, 3, 8, device=device))
    model = whole_weights(Attention(tritile.nn.Linear, tritile.matmul)).to(device)
    parallelized(model, mesh, ["q", "k", "v"], ["out"])
    assert_same(steps(model, whole(2, 3, 8, device=device)), wanted)


def spreader(mesh):
    """What spreads a tensor over the ranks by a dimension, or gives every rank all of it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def spread(tensor, dim=None):
        return distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)])

    return spread


def same(got, wanted, placement):
    assert got.placements == (placement,), got.placements
    assert torch.equal(got.full_tensor(), wanted)


def operators(mesh, device):
    """Operands spread in ways that fit and that do not; what follows a product tells what may stay a sum."""
    from torch.distributed.tensor import Partial, Shard

    spread = spreader(mesh)
    x, weight = whole(4, 6, device=device), whole(8, 6, device=device)
    bias, residual = whole(8, device=device), whole(4, 8, device=device)
    plain = F.linear(x, weight, bias)
    over_k = spread(x, 1), spread(weight, 1), spread(bias)
    with torch.inference_mode():
        same(tritile.linear(*over_k), plain, Partial())
    for _ in range(2):  # what torch has found for one activation is not kept for another
        same(tritile.linear(*over_k), plain, Partial())
        assert not tritile.linear(*over_k, activation="relu").placements[0].is_partial()
        assert torch.equal(tritile.linear(*over_k, activation="relu").full_tensor(), plain.relu())
    got = tritile.linear(*over_k, residual=spread(residual, 0), activation="relu")
    assert torch.equal(got.full_tensor(), plain.relu() + residual)
    got = tritile.linear(spread(x, 0), spread(weight), residual=spread(residual, 1))
    assert torch.equal(got.full_tensor(), x @ weight.mT + residual)
    for dtype in (None, torch.float16, None):
        assert tritile.matmul(spread(x), spread(weight.mT, 1), out_dtype=dtype).dtype == (dtype or x.dtype)
    same(tritile.matmul(spread(x, 0), spread(weight.mT)), x @ weight.mT, Shard(0))
    added = tritile.addmm(spread(residual), spread(x, 1), spread(weight.mT, 0), beta=2)
    same(added, 2 * residual + x @ weight.mT, Partial())
    gate = tritile.gated_linear(
        spread(x), spread(weight, 0), spread(-weight, 0), bias_gate=spread(bias), activation="relu"
    )
    same(gate, plain.relu() * (x @ -weight.mT), Shard(1))
    turned = whole(2, 3, 4, device=device)
    for dims in ((2, 0, 1), (0, 2, 1)):
        same(tritile.permute(spread(turned, 2), dims), turned.permute(dims), Shard(dims.index(2)))


def few_bits(mesh, device):
    """Groups, fp8's and int8's products with scales, and packed weights: every rank makes the whole."""
    from torch.distributed.tensor import Replicate, distribute_module

    spread, scale = spreader(mesh), torch.tensor([[0.5]], device=device)
    a, b = whole(4, 6, most=9, device=device), whole(6, 8, most=9, device=device)
    whole_scales = spread(scale), spread(scale)
    for of_a, of_b in ((1, 0), (0, None), (None, 1)):
        operands = spread(a.to(torch.int8), of_a), spread(b.to(torch.int8), of_b)
        got = tritile.scaled_matmul(*operands, *whole_scales, out_dtype=torch.float32)
        same(got, a @ b / 4, Replicate())

    experts, ends = whole(2, 6, 8, device=device), torch.tensor([1, 4], dtype=torch.int32, device=device)
    wanted = torch.cat([a[:1] @ experts[0], a[1:] @ experts[1]])
    for of_a, of_b in ((None, 2), (1, 1)):
        same(
            tritile.grouped_matmul(spread(a, of_a), spread(experts, of_b), spread(ends)), wanted, Replicate()
        )

    layer = nn.Linear(6, 8, device=device, dtype=torch.float16)
    whole_weights(layer).weight.data[:, 0] = 127  # so that its scales are 1
    tritile.nn.convert(layer, "int8", group_size=32)
    x = a.half()
    with torch.no_grad():
        wanted = layer(x)
        same(distribute_module(layer, mesh)(spread(x, 0)), wanted, Replicate())


def two_dimensions(mesh, device):
    """A mesh of two dimensions, one of them a single rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device, (RANKS, 1))
    x, weight = whole(4, 6, device=device), whole(8, 6, device=device)
    got = tritile.linear(
        distribute_tensor(x, mesh, [Shard(0), Replicate()]),
        distribute_tensor(weight, mesh, [Replicate(), Shard(0)]),
    )
    assert got.placements == (Shard(0), Shard(1))
    assert torch.equal(got.full_tensor(), x @ weight.mT)


def compiled(mesh, device):
    """Layers that are spread, compiled whole."""
    wanted = steps(whole_weights(Mlp(nn.Linear)).to(device), whole(4, 6, device=device))
    model = parallelized(whole_weights(Mlp(tritile.nn.Linear)).to(device), mesh, ["up"], ["down"])
    model.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    assert_same(steps(model, whole(4, 6, device=device)), wanted)


def fully_sharded(mesh, device):
    """Parameters spread for memory alone."""
    from torch.distributed.fsdp import fully_shard

    wanted = steps(whole_weights(Mlp(nn.Linear)).to(device), whole(2, 3, 6, device=device))
    model = whole_weights(Mlp(tritile.nn.Linear)).to(device)
    for each in (model.up, model.down, model):
        fully_shard(each, mesh=mesh)
    assert_same(steps(model, whole(2, 3, 6, device=device)), wanted)


def enter_rank(works, rank, device, folder):
    """Do all works as one of the ranks, on the CPU or on a GPU of one's own."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["TRITILE_CACHE_DIR"] = str(folder / f"cache-{rank}")
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device, (RANKS,))
    for work in works:
        globals()[work](mesh, device)
        distributed.barrier()
    distributed.destroy_process_group()


def run_ranks(server, folder, device, works):
    """Do works as two ranks, each a process of its own; it tells where it failed."""
    ranks = [server.Process(target=enter_rank, args=(works, rank, device, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS
