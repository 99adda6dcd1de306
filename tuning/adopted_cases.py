"""Public kernels under `triton.autotune`, with their sources as they are: where from, and how they run.

A case builds inputs of a size and returns two functions without arguments. The first runs the library's
operation, the second is the project's own reference or plain torch, in float32 at least; both return the
same number of tensors. The sources are no part of tritile: `adopted.py --fetch` takes them by git. Packages
whose `__init__` imports a whole library are taken without it.
"""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Tensors = tuple[Any, ...]
Built = tuple[Callable[[], Tensors], Callable[[], Tensors]]


@dataclass(frozen=True)
class Source:
    """Files of a public repository. `root` is the folder in it that goes on the path of modules."""

    repository: str
    commit: str
    paths: tuple[str, ...]
    root: str = "."


SOURCES: Final = {
    "fla": Source(
        "fla-org/flash-linear-attention", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89",
        ("fla/__init__.py", "fla/utils", "fla/ops/backends", "fla/ops/common", "fla/ops/cp",
         "fla/ops/gated_delta_rule", "fla/ops/gla", "fla/ops/kda", "fla/ops/utils", "fla/modules/backends",
         "fla/modules/conv/triton", "fla/modules/l2norm.py"),
    ),
    "mamba": Source(
        "state-spaces/mamba", "e9594ce1c732d97440f0332fdc43170a2294dbfa",
        ("mamba_ssm/ops/triton/*.py", "mamba_ssm/utils/determinism.py", "mamba_ssm/utils/torch.py",
         ":!mamba_ssm/ops/triton/mamba3", ":!mamba_ssm/ops/triton/layer_norm.py"),
    ),
    "flash-attention": Source(
        "Dao-AILab/flash-attention", "0251105a2fb19d2957484b7f023cd8c115286ced",
        ("flash_attn/ops/triton/layer_norm.py", "flash_attn/utils/library.py", "flash_attn/utils/torch.py"),
    ),
    "liger": Source(
        "linkedin/Liger-Kernel", "ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
        ("src/liger_kernel/ops/dyt.py", "src/liger_kernel/ops/mlp.py", "src/liger_kernel/ops/utils.py",
         "src/liger_kernel/utils.py"),
        "src",
    ),
    "unsloth": Source(
        "unslothai/unsloth", "015bdef0d94a241bcd94eec7a405b1700632180d",
        ("unsloth/kernels/moe/grouped_gemm/interface.py", "unsloth/kernels/moe/grouped_gemm/kernels/*.py"),
    ),
    "gemlite": Source(
        "dropbox/gemlite", "fd3f9338a96b0c792b7f06fc1b26702aadb7e2d1",
        ("gemlite/*.py", ":!gemlite/vllm", ":!gemlite/triton_kernels/experimental"),
    ),
    "xformers": Source(
        "facebookresearch/xformers", "ca6d2aa0d43241fc8a8dcd872debc2406160160d",
        ("xformers/ops/_triton/tiled_matmul_kernels.py", "xformers/ops/_triton/matmul_perf_model.py"),
    ),
    "torchao": Source(
        "pytorch/ao", "36027d82d1ad9949597ea16002ff4940374b1b94",
        ("torchao/prototype/quantized_training/int8_mm.py",
         "torchao/prototype/moe_training/kernels/jagged_float8_scales.py",
         "torchao/prototype/blockwise_fp8_training/kernels.py"),
    ),
    "attorch": Source(
        "BobMcDear/attorch", "67c2772baf33913ef51c2d1064f746ca17b63749", ("attorch/*.py",)
    ),
    "lmdeploy": Source(
        "InternLM/lmdeploy", "1263d5cd889b7ad500e85b8eb20401327a4516ab",
        ("lmdeploy/pytorch/kernels/cuda/awq_kernels.py",
         "lmdeploy/pytorch/kernels/cuda/blocked_gemm_fp8.py", "lmdeploy/pytorch/kernels/cuda/utils.py",
         "lmdeploy/pytorch/kernels/cuda/w8a8_triton_kernels.py",
         "lmdeploy/pytorch/kernels/default/w8a8_kernels.py"),
    ),
    "vllm": Source(
        "vllm-project/vllm", "239b5ff30cf46f9196149c888a20be2096fdff03",
        tuple(f"vllm/model_executor/layers/mamba/ops/{name}.py"
              for name in ("ssd_bmm", "ssd_chunk_state", "mamba_ssm", "triton_helpers")),
    ),
    "triton": Source(
        "triton-lang/triton", "9282d7190452c5f173c7fe9f1052bdd6ed5b67a9",
        ("python/tutorials/06-fused-attention.py",), "python/tutorials",
    ),
    "tritonbench": Source(
        "meta-pytorch/tritonbench", "db2155c807755c19f5d98c64917ec897f24061f3",
        ("tritonbench/operators/gemm/triton_matmul.py",
         "tritonbench/operators/gemm/triton_matmul_configs.py",
         "tritonbench/operators/grouped_gemm/kernels.py", "tritonbench/operators/int4_gemm/kernel.py"),
    ),
}  # fmt: skip

# What the files above import of their libraries and never use here, and compiled extensions.
STUBS: Final = {
    "gemlite/gemlite/configs/none.json": "{}\n",  # in place of configs that were tuned on some GPUs
    "unsloth/unsloth/__init__.py": 'DEVICE_TYPE = "cuda"\n',
    "unsloth/pandas.py": "DataFrame = object\n",
    "torchao/torchao/float8/config.py": "from torch import float8_e4m3fn as e4m3_dtype\n",
    "lmdeploy/lmdeploy/utils.py": "from logging import getLogger as get_logger\n",
    "vllm/vllm/_custom_ops.py": "",
    "vllm/vllm/triton_utils/__init__.py": (
        "import triton\nfrom triton import language as tl\n\nHAS_TRITON = True\n"
    ),
    "vllm/vllm/v1/attention/backends/utils.py": "NULL_BLOCK_ID = 0\n",
}


def fetch(folder: Path) -> None:
    """Take the files of every source from GitHub, at its commit, into a folder of its own within `folder`."""
    for name, source in SOURCES.items():
        git = ("git", "-C", str(folder / name))
        (folder / name).mkdir(parents=True, exist_ok=True)
        for command in (
            ("init", "--quiet"),
            ("fetch", "--quiet", "--depth=1", "--filter=blob:none", f"https://github.com/{source.repository}",
             source.commit),
            ("checkout", "--quiet", "FETCH_HEAD", "--", *source.paths),
        ):  # fmt: skip
            subprocess.run([*git, *command], check=True)
        shutil.rmtree(folder / name / ".git")
    for name, text in STUBS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def add_to_path(folder: Path) -> None:
    """Put the fetched sources ahead on the path of modules."""
    sys.path[:0] = [str((folder / name / source.root).resolve()) for name, source in SOURCES.items()]


def normal(device: str, *shape: int, dtype: str = "bfloat16", scale: float = 1.0) -> Any:
    import torch

    return (torch.randn(*shape, device=device) * scale).to(getattr(torch, dtype))


def with_gradients(function: Callable[..., Any], inputs: Sequence[Any], seed: Any) -> Callable[[], Tensors]:
    """Return what computes `function(*inputs)`, and the inputs' gradients for `seed`, the output's."""
    import torch

    def run() -> Tensors:
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = function(*leaves)
        out = out[0] if isinstance(out, tuple) else out
        return (out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype)))

    return run


def both(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Any], shape: Sequence[int]
) -> Built:
    """Return a library's function and its reference, with gradients; the reference is given float32."""
    seed = normal(str(inputs[0].device), *shape)
    wide = [each.float() for each in inputs]
    return with_gradients(function, inputs, seed), with_gradients(reference, wide, seed)


# --- The cases ---


def fla_heads(device: str, batch: int, length: int, heads: int, width: int) -> tuple[Any, ...]:
    """Return q, normalised k and v of fla's attention, and numbers from 0 to 1 for each head."""
    import torch

    q, k, v = (normal(device, batch, length, heads, width) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype)
    return q, k, v, normal(device, batch, length, heads).sigmoid()


def fla_gla(device: str, *size: int) -> Built:
    import torch
    from fla.ops.gla.chunk import chunk_gla
    from fla.ops.gla.naive import naive_recurrent_gla

    q, k, v, _ = fla_heads(device, *size)
    gate = torch.nn.functional.logsigmoid(normal(device, *size, dtype="float32")) / 16
    return both(chunk_gla, naive_recurrent_gla, (q, k, v, gate), v.shape)


def fla_gated_delta_rule(device: str, *size: int) -> Built:
    import torch
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    q, k, v, beta = fla_heads(device, *size)
    gate = torch.nn.functional.logsigmoid(normal(device, *size[:-1], dtype="float32"))
    return both(chunk_gated_delta_rule, naive_chunk_gated_delta_rule, (q, k, v, gate, beta), v.shape)


def fla_kda(device: str, *size: int) -> Built:
    import torch
    from fla.ops.kda.chunk import chunk_kda
    from fla.ops.kda.naive import naive_chunk_kda

    q, k, v, beta = fla_heads(device, *size)
    gate = torch.nn.functional.logsigmoid(normal(device, *size, dtype="float32")) / 16
    return both(chunk_kda, naive_chunk_kda, (q, k, v, gate, beta), v.shape)


def fla_causal_conv1d(device: str, batch: int, length: int, width: int, taps: int) -> Built:
    import torch
    from fla.modules.conv.triton.ops import causal_conv1d_fwd

    x, weight = normal(device, batch, length, width), normal(device, width, taps)

    def reference() -> Tensors:
        padded = torch.nn.functional.pad(x.float().transpose(1, 2), (taps - 1, 0))
        y = torch.nn.functional.conv1d(padded, weight.float()[:, None], groups=width)
        return (torch.nn.functional.silu(y).transpose(1, 2),)

    return lambda: (causal_conv1d_fwd(x, weight, None, None, activation="silu")[0],), reference


def fla_l2norm(device: str, rows: int, width: int) -> Built:
    from fla.modules.l2norm import l2norm_fwd

    x = normal(device, rows, width)
    norm = (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return lambda: (l2norm_fwd(x)[0],), lambda: (x.float() * norm,)


def mamba_inputs(device: str, batch: int, length: int, heads: int, width: int, state: int) -> tuple[Any, ...]:
    x, dt = normal(device, batch, length, heads, width), normal(device, batch, length, heads, dtype="float32")
    a = -normal(device, heads, dtype="float32").exp()
    b, c = (normal(device, batch, length, 1, state, scale=state**-0.25) for _ in range(2))
    return x, (dt - 4).exp() / (1 + (dt - 4).exp()), a, b, c


def mamba_chunk_scan(device: str, chunk: int, *size: int) -> Built:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    inputs = mamba_inputs(device, *size)
    wide = [each.float() for each in inputs]
    return (
        lambda: (mamba_chunk_scan_combined(*inputs, chunk),),
        lambda: (chunk_scan_in_torch(*wide, chunk=chunk),),
    )


def chunk_scan_in_torch(x: Any, dt: Any, a: Any, b: Any, c: Any, chunk: int) -> Any:
    """Return y of `h' = exp(dt a) h + dt b x, y = c h`, by chunks, of one group.

    x is [batch, length, heads, width], dt [batch, length, heads], b and c [batch, length, 1, state].
    """
    import torch

    batch, length, heads, width = x.shape
    x, dt, b, c = (
        each.reshape(batch, length // chunk, chunk, *each.shape[2:])
        for each in (x, dt, b[:, :, 0], c[:, :, 0])
    )
    sums = (dt * a).cumsum(2)
    decay = (sums[:, :, :, None] - sums[:, :, None]).exp()
    decay = decay * torch.ones(chunk, chunk, device=x.device).tril()[None, None, :, :, None]
    scores = torch.einsum("nqls,nqms->nqlm", c, b)
    y = torch.einsum("nqlm,nqlmh,nqmh,nqmhp->nqlhp", scores, decay, dt, x)
    states = torch.einsum("nqms,nqmh,nqmhp->nqhps", b, (sums[:, :, -1:] - sums).exp() * dt, x)
    state, before = torch.zeros_like(states[:, 0]), []
    for index in range(states.shape[1]):
        before.append(state)
        state = state * sums[:, index, -1].exp()[..., None, None] + states[:, index]
    y = y + torch.einsum("nqls,nqhps,nqlh->nqlhp", c, torch.stack(before, 1), sums.exp())
    return y.reshape(batch, length, heads, width)


def mamba_swiglu(device: str, rows: int, width: int) -> Built:
    import torch
    from mamba_ssm.ops.triton.k_activations import swiglu

    def reference(xy: Any) -> Any:
        x, y = xy.chunk(2, -1)
        return torch.nn.functional.silu(x) * y

    return both(swiglu, reference, (normal(device, rows, 2 * width),), (rows, width))


def flash_layer_norm(device: str, rows: int, width: int) -> Built:
    import torch
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    inputs = normal(device, rows, width), normal(device, width), normal(device, width)
    return both(
        lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=1e-5),
        lambda x, weight, bias: torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5),
        inputs,
        (rows, width),
    )


def flash_rms_norm(device: str, rows: int, width: int) -> Built:
    import torch
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    inputs = normal(device, rows, width), normal(device, width), normal(device, rows, width)
    return both(
        lambda x, weight, residual: rms_norm_fn(x, weight, None, residual, eps=1e-5),
        lambda x, weight, residual: torch.nn.functional.rms_norm(x + residual, (width,), weight, 1e-5),
        inputs,
        (rows, width),
    )


def liger_dyt(device: str, rows: int, width: int) -> Built:
    from liger_kernel.ops.dyt import LigerDyTFunction

    x, alpha = normal(device, rows, width), normal(device, 1)
    weight, bias = normal(device, width), normal(device, width)
    return both(
        LigerDyTFunction.apply,
        lambda x, alpha, weight, bias: weight * (alpha * x).tanh() + bias,
        (x, alpha, weight, bias),
        (rows, width),
    )


def liger_mlp(device: str, length: int, width: int, hidden: int) -> Built:
    import torch
    from liger_kernel.ops.mlp import gemm_swiglu

    x = normal(device, 1, length, width)
    gate, up = (normal(device, hidden, width, scale=width**-0.5) for _ in range(2))

    def reference() -> Tensors:
        return (torch.nn.functional.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T),)

    return lambda: (gemm_swiglu(x, gate, up, 1.0, store_preact=False)[0],), reference


def unsloth_moe(device: str, experts: int, tokens: int, width: int, hidden: int) -> Built:
    """One grouped product of tokens that are sorted by expert."""
    import torch
    from unsloth.kernels.moe.grouped_gemm.interface import grouped_gemm_forward

    x, weight = normal(device, tokens, width), normal(device, experts, hidden, width, scale=width**-0.5)
    sizes = torch.full((experts,), tokens // experts, dtype=torch.int32, device=device)

    def reference() -> Tensors:
        return (
            torch.bmm(x.float().view(experts, -1, width), weight.float().transpose(1, 2)).view(
                tokens, hidden
            ),
        )

    return lambda: (grouped_gemm_forward(x, weight, 1, sizes, autotune=True),), reference


def gemlite(device: str, kind: str, m: int, n: int, k: int) -> Built:
    """Product with a weight of 4 bits, in groups of 128."""
    import torch
    from gemlite.core import DType, GemLiteLinearTriton

    group = 128
    weight = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(n * k // group, 1, device=device) * 0.01 + 0.001).half()
    zeros = torch.full_like(scales, 8.0)
    layer = GemLiteLinearTriton(
        W_nbits=4,
        group_size=group,
        in_features=k,
        out_features=n,
        input_dtype=DType.FP16,
        output_dtype=DType.FP16,
    )
    layer.pack(weight, scales, zeros, None)
    x = normal(device, m, k, dtype="float16", scale=0.1)
    whole = ((weight.view(-1, group).float() - zeros.float()) * scales.float()).view(n, k)
    return lambda: (layer.forward_manual(x, matmul_type=kind),), lambda: (x.float() @ whole.T,)


def xformers_tiled_matmul(device: str, m: int, k: int, *widths: int) -> Built:
    """q, k and v of one input, in one launch."""
    import torch
    from xformers.ops._triton.tiled_matmul_kernels import _launch_triton_matmul

    x, weights = normal(device, m, k), [normal(device, n, k, scale=k**-0.5).T for n in widths]

    def run() -> Tensors:
        outs = [torch.empty(m, n, device=device, dtype=x.dtype) for n in widths]
        _launch_triton_matmul([[x]], [weights], [outs], [m], [*widths], [k])
        return tuple(outs)

    return run, lambda: tuple(x.float() @ weight.float() for weight in weights)


def int8(device: str, *shape: int) -> Any:
    import torch

    return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)


def torchao_int8_mm(device: str, m: int, n: int, k: int) -> Built:
    import torch
    from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm_cuda

    a, b = int8(device, m, k), int8(device, n, k).T
    rows, columns = torch.rand(m, 1, device=device), torch.rand(1, n, device=device)
    return (
        lambda: (scaled_int8_mm_cuda(a, b, rows, columns),),
        lambda: ((a.double() @ b.double()) * rows.double() * columns.double(),),
    )


def torchao_jagged_scales(device: str, groups: int, rows: int, width: int) -> Built:
    """Quantise the columns of each group of rows by their largest element, and scale them back."""
    import torch
    from torchao.prototype.moe_training.kernels.jagged_float8_scales import (
        triton_fp8_per_group_colwise_scales,
    )

    x, size = normal(device, rows, width), rows // groups
    ends = torch.arange(size, rows + 1, size, dtype=torch.int32, device=device)

    def run() -> Tensors:
        out, scales = triton_fp8_per_group_colwise_scales(x, ends)
        return (out.float().view(groups, size, width) / scales.view(groups, 1, width),)

    return run, lambda: (x.float().view(groups, size, width),)


def torchao_blockwise_quant(device: str, rows: int, width: int) -> Built:
    from torchao.prototype.blockwise_fp8_training.kernels import triton_fp8_blockwise_act_quant_lhs

    x = normal(device, rows, width)

    def run() -> Tensors:
        out, scales = triton_fp8_blockwise_act_quant_lhs(x)
        return (out.float().view(rows, -1, 128) * scales[..., None],)

    return run, lambda: (x.float().view(rows, -1, 128),)


def attorch_linear(device: str, m: int, n: int, k: int) -> Built:
    import torch
    from attorch.linear_layer import LinearAutoGrad

    x, bias = normal(device, m, k, dtype="float16"), normal(device, n, dtype="float16")
    weight = normal(device, k, n, dtype="float16", scale=k**-0.5)
    return (
        lambda: (LinearAutoGrad.apply(x, weight, bias, "gelu"),),
        lambda: (torch.nn.functional.gelu(x.float() @ weight.float() + bias.float()),),
    )


def attorch_layer_norm(device: str, rows: int, width: int) -> Built:
    import torch
    from attorch.layer_norm_layer import LayerNormAutoGrad

    inputs = normal(device, rows, width), normal(device, width), normal(device, width)
    return both(
        lambda x, weight, bias: LayerNormAutoGrad.apply(x, weight, bias, 1e-5),
        lambda x, weight, bias: torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5),
        inputs,
        (rows, width),
    )


def attorch_softmax(device: str, rows: int, width: int) -> Built:
    import torch
    from attorch.softmax_layers import SoftmaxAutoGrad

    return both(
        lambda x: SoftmaxAutoGrad.apply(x, False, False),
        lambda x: torch.softmax(x, -1),
        (normal(device, rows, width),),
        (rows, width),
    )


def lmdeploy_w8a8(device: str, m: int, n: int, k: int) -> Built:
    import torch
    from lmdeploy.pytorch.kernels.cuda.w8a8_triton_kernels import matmul_kernel_dynamic_quant

    a, b = int8(device, m, k), int8(device, n, k)
    rows, columns = torch.rand(m, 1, device=device) / k, torch.rand(n, 1, device=device) / k
    return (
        lambda: (matmul_kernel_dynamic_quant(a, b, rows, columns),),
        lambda: ((a.double() @ b.double().T) * rows.double() * columns.double().T,),
    )


def lmdeploy_awq(device: str, m: int, n: int, k: int) -> Built:
    import torch
    from lmdeploy.pytorch.kernels.cuda.awq_kernels import awq_linear

    group, order = 128, (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight weights in a word

    def packed(rows: int) -> tuple[Any, Any]:
        whole = torch.randint(0, 16, (rows, n), dtype=torch.int32, device=device)
        words = torch.zeros(rows, n // 8, dtype=torch.int32, device=device)
        for index, place in enumerate(order):
            words |= whole.view(rows, -1, 8)[..., index] << (4 * place)
        return whole, words

    (weight, words), (zeros, zero_words) = packed(k), packed(k // group)
    x = normal(device, m, k, dtype="float16", scale=0.1)
    scales = (torch.rand(k // group, n, device=device) * 0.01 + 0.001).half()
    whole = (weight - zeros.repeat_interleave(group, 0)).float() * scales.float().repeat_interleave(group, 0)
    return lambda: (awq_linear(x, words, scales, zero_words),), lambda: (x.float() @ whole,)


def lmdeploy_fp8(device: str, m: int, n: int, k: int) -> Built:
    import torch
    from lmdeploy.pytorch.kernels.cuda.blocked_gemm_fp8 import blocked_gemm_fp8

    a, b = normal(device, m, k, dtype="float8_e4m3fn"), normal(device, n, k, dtype="float8_e4m3fn").T
    rows = torch.rand(m, k // 128, device=device) + 0.5
    blocks = torch.rand(k // 128, n // 128, device=device) + 0.5

    def reference() -> Tensors:
        wide = a.float() * rows.repeat_interleave(128, 1)
        return (wide @ (b.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)),)

    return lambda: (blocked_gemm_fp8(a, rows, b, blocks, torch.bfloat16),), reference


def vllm_ssd_bmm(device: str, chunk: int, length: int, groups: int, width: int) -> Built:
    import torch
    from vllm.model_executor.layers.mamba.ops.ssd_bmm import _bmm_chunk_fwd

    a, b = normal(device, length, groups, width), normal(device, length, groups, width)
    ends = torch.arange(0, length + 1, chunk, dtype=torch.int32, device=device)
    one, two = (each.float().view(-1, chunk, groups, width).transpose(1, 2) for each in (a, b))
    return (
        lambda: (_bmm_chunk_fwd(a, b, chunk, ends, output_dtype=torch.float32),),
        lambda: (one @ two.transpose(-1, -2),),
    )


def vllm_chunk_state(device: str, chunk: int, *size: int) -> Built:
    import torch
    from vllm.model_executor.layers.mamba.ops.ssd_chunk_state import _chunk_cumsum_fwd, _chunk_state_fwd

    x, dt, a, b, _ = (each[0] if each.ndim > 1 else each for each in mamba_inputs(device, 1, *size))
    ends = torch.arange(0, size[0] + 1, chunk, dtype=torch.int32, device=device)

    def run() -> Tensors:
        sums, steps = _chunk_cumsum_fwd(dt, a, chunk, ends)
        return sums, _chunk_state_fwd(b, x, steps, sums, ends)

    def reference() -> Tensors:
        steps = dt.view(-1, chunk, dt.shape[-1])
        sums = (steps * a).cumsum(1)
        xs, bs = x.float().view(-1, chunk, *x.shape[1:]), b[:, 0].float().view(-1, chunk, b.shape[-1])
        states = torch.einsum("qms,qmh,qmhp->qhps", bs, (sums[:, -1:] - sums).exp() * steps, xs)
        return sums.permute(2, 0, 1), states

    return run, reference


def tutorial_attention(device: str, *size: int) -> Built:
    """Causal attention of shape (batch, heads, length, width), of which the forward pass is tuned."""
    import torch

    attention = importlib.import_module("06-fused-attention").attention
    q, k, v = (normal(device, *size, dtype="float16") for _ in range(3))

    def reference() -> Tensors:
        wide = (each.float() for each in (q, k, v))
        return (torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.5),)

    return lambda: (attention(q, k, v, True, 0.5, False),), reference


def tritonbench_matmul(device: str, m: int, n: int, k: int) -> Built:
    from tritonbench.operators.gemm.triton_matmul import matmul

    a, b = normal(device, m, k, dtype="float16"), normal(device, k, n, dtype="float16", scale=k**-0.5)
    return lambda: (matmul(a, b),), lambda: (a.float() @ b.float(),)


def tritonbench_grouped_gemm(device: str, n: int, k: int, *rows: int) -> Built:
    from tritonbench.operators.grouped_gemm.kernels import triton_group_gemm_fn

    a = [normal(device, m, k, dtype="float16") for m in rows]
    b = [normal(device, k, n, dtype="float16", scale=k**-0.5) for _ in rows]
    return (
        lambda: tuple(triton_group_gemm_fn(a, b)),
        lambda: tuple(x.float() @ y.float() for x, y in zip(a, b, strict=True)),
    )


def tritonbench_int4(device: str, m: int, n: int, k: int) -> Built:
    import torch
    from tritonbench.operators.int4_gemm.kernel import matmul, pack_2xint4

    x, whole = normal(device, m, k), torch.randint(-8, 8, (k, n), device=device)
    words = pack_2xint4(whole).T.contiguous().T
    return lambda: (matmul(x, words),), lambda: (x.float() @ whole.float(),)


@dataclass(frozen=True)
class Case:
    """An operation of a project at a size, and the dtype and steps that its error comes from."""

    build: Callable[..., Built]
    size: tuple[Any, ...]
    dtype: str = "bfloat16"
    steps: float = 2.0

    @property
    def project(self) -> str:
        """Return the name in SOURCES of where its kernels are from."""
        word = self.build.__name__.partition("_")[0]
        return {"flash": "flash-attention", "tutorial": "triton"}.get(word, word)

    @property
    def name(self) -> str:
        return f"{self.build.__name__} {'x'.join(map(str, self.size))}"

    @property
    def allowed(self) -> float:
        """Return the largest |out - reference| / |reference| of a right result, some epsilons."""
        import torch

        return self.steps * torch.finfo(getattr(torch, self.dtype)).eps


# Those that take Triton longest are first, and far apart, so that parts of the list take alike.
CASES: Final = (
    Case(fla_gla, (1, 2048, 8, 128), steps=4),
    Case(unsloth_moe, (32, 8192, 2048, 1536)),
    Case(mamba_chunk_scan, (256, 2, 4096, 24, 64, 128)),
    Case(fla_gated_delta_rule, (1, 4096, 8, 128), steps=4),
    Case(fla_kda, (1, 4096, 8, 128), steps=4),
    Case(xformers_tiled_matmul, (2048, 4096, 4096, 1024, 1024)),
    Case(torchao_int8_mm, (4096, 4096, 4096), "float32"),
    Case(liger_mlp, (4096, 2048, 5632)),
    Case(tritonbench_matmul, (4096, 4096, 4096), "float16"),
    Case(tutorial_attention, (4, 32, 2048, 128), "float16"),
    Case(gemlite, ("GEMM", 128, 4096, 4096), "float16"),
    Case(torchao_jagged_scales, (8, 8192, 4096), "float8_e4m3fn", 1),
    Case(liger_dyt, (8192, 4096)),
    Case(torchao_blockwise_quant, (8192, 4096), "float8_e4m3fn", 1),
    Case(fla_causal_conv1d, (2, 4096, 4096, 4)),
    Case(gemlite, ("GEMM_SPLITK", 16, 4096, 4096), "float16"),
    # Up to 256 partial sums are added in float16, each of which rounds: by sqrt(256 / 2) / sqrt(12) epsilons.
    Case(gemlite, ("GEMV_REVSPLITK", 1, 4096, 4096), "float16", steps=4),
    Case(tritonbench_grouped_gemm, (4096, 2048, 1024, 2048, 512, 256), "float16"),
    Case(attorch_linear, (4096, 4096, 4096), "float16"),
    Case(vllm_chunk_state, (256, 8192, 24, 64, 128)),
    Case(vllm_ssd_bmm, (256, 8192, 8, 128)),
    Case(fla_l2norm, (65536, 128)),
    Case(flash_layer_norm, (8192, 4096)),
    Case(flash_rms_norm, (8192, 4096)),
    Case(attorch_layer_norm, (8192, 4096)),
    Case(attorch_softmax, (8192, 4096)),
    Case(mamba_swiglu, (8192, 5632)),
    Case(lmdeploy_w8a8, (4096, 4096, 4096), "float16"),
    Case(lmdeploy_awq, (16, 4096, 8192), "float16"),
    Case(lmdeploy_fp8, (4096, 4096, 4096)),
    Case(tritonbench_int4, (256, 4096, 4096)),
)
