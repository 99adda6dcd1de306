"""Layers that multiply by tritile, and `convert`, which exchanges the layers of a model for them.

On several GPUs: `Linear` is a subclass of torch's, with the same parameters, so that `fully_shard`, DDP, and
`parallelize_module` with `ColwiseParallel` and `RowwiseParallel` take it. Parameters that are DTensors go
through tritile's operators, which have sharding rules (`tritile.ops.sharding`), forward and backward:

    tritile.nn.convert(model, always=True)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

Each rank plans its own kernels. A result that several ranks compute from the same operands has the same bits
on all where they run the same configs: of the tables, or of stores that hold the same. Quantized layers are
not sharded: every rank holds their weights whole.
"""

from tritile.nn.convert import Conversion, ConversionRow, convert, restore
from tritile.nn.linear import Linear
from tritile.nn.quantized import QuantizedLinear

__all__ = ["Conversion", "ConversionRow", "Linear", "QuantizedLinear", "convert", "restore"]
