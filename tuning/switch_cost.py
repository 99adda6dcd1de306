"""Time what `tritile.use_in_torch` costs the host: microseconds a call, on the current GPU.

    python tuning/switch_cost.py                      # with its library in C++, which is built first
    TRITILE_CROSSING=0 python tuning/switch_cost.py   # with kernels in Python alone

Operands are so small that the GPU waits for the host. "torch": `use_in_torch` is off. "off": its policy is
"never". "left": its policy passes these calls through to torch. "taken": tritile handles them. The times are
medians of rounds in which all are measured by turns.
"""

import statistics
import time

import torch

import tritile
from tritile.core.settings import wants_crossing
from tritile.in_torch import building

SIZE, CALLS, ROUNDS = 64, 400, 25
POLICIES = {"off": "never", "left": "expected", "taken": "always"}


def calls() -> dict:
    """Return the calls to time, by name."""
    a, b, c = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    few, wide = a[:16], a.float()
    layer = torch.nn.Linear(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    return {
        "mm": lambda: torch.mm(a, b),
        "mm, 16 rows": lambda: torch.mm(few, b),
        "mm, out": lambda: torch.mm(a, b, out=c),
        "mm, fp32": lambda: torch.mm(wide, wide),
        "addmm": lambda: torch.addmm(c, a, b),
        "linear": lambda: layer(a),
        "linear, 16 rows": lambda: layer(few),
        "bmm": lambda: torch.bmm(a[None], b[None]),
        "transposed, contiguous": lambda: a.mT.contiguous(),
        "clone": lambda: a.clone(),
    }


def host_us(call) -> float:
    """Return the microseconds that one call keeps the host busy."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def measured(call) -> dict[str, float]:
    """Return median microseconds of a call without `use_in_torch`, and by policy."""
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        times.setdefault("torch", []).append(host_us(call))
        for name, policy in POLICIES.items():
            with tritile.use_in_torch(policy):
                call()
                times.setdefault(name, []).append(host_us(call))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a table."""
    if wants_crossing():
        building.build()
    kernels = "C++" if building.library() else "Python"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels in {kernels}")
    print(f"{'':24}" + "".join(f"{name:>8}" for name in ("torch", *POLICIES)) + "  us")
    with torch.no_grad():
        for name, call in calls().items():
            found = measured(call)
            print(f"{name:24}" + "".join(f"{us:8.1f}" for us in found.values()))


if __name__ == "__main__":
    main()
