"""Layers that multiply with tritile, and `convert`, which replaces a model's layers with them.

On several GPUs: `Linear` is a subclass of torch's with the same parameters, so it works with `fully_shard`,
DDP, and `parallelize_module` with `ColwiseParallel` and `RowwiseParallel`. Parameters that are DTensors go
through tritile's operators, which have sharding rules (`tritile.ops.sharding`) for forward and backward:

    tritile.nn.convert(model, always=True)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

Each rank plans its own kernels. Ranks that compute the same result from the same operands get the same bits
if they run the same configs, as they do with one table, stores with the same contents, or `tritile.sync`.
Quantized layers are not sharded: every rank holds their whole weights.
"""

from tritile.nn.convert import Conversion, ConversionRow, convert, restore
from tritile.nn.linear import Linear
from tritile.nn.quantized import QuantizedLinear

__all__ = ["Conversion", "ConversionRow", "Linear", "QuantizedLinear", "convert", "restore"]
