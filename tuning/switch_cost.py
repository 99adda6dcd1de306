"""What `tritile.use_in_torch` costs the host: microseconds a call, on the current GPU.

    python tuning/switch_cost.py

Operands are so small that the GPU waits for the host. "torch": with no switch in the process; "off": with
one on in another place, so that calls go through Python to torch's kernel; "left": inside one that leaves
them; "taken": inside one that takes them. Medians of rounds in which all are measured in turn.
"""

import statistics
import time

import torch

import tritile

SIZE, CALLS, ROUNDS = 64, 400, 25


def calls() -> dict:
    """What is timed, by name."""
    a, b, c = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wide = a.float()
    layer = torch.nn.Linear(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    return {
        "mm": lambda: torch.mm(a, b),
        "mm, out": lambda: torch.mm(a, b, out=c),
        "mm, fp32": lambda: torch.mm(wide, wide),
        "addmm": lambda: torch.addmm(c, a, b),
        "linear": lambda: layer(a),
        "bmm": lambda: torch.bmm(a[None], b[None]),
        "transposed, contiguous": lambda: a.mT.contiguous(),
        "clone": lambda: a.clone(),
    }


def host_us(call) -> float:
    """Microseconds that one call keeps the host busy."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def measured(call) -> dict[str, float]:
    """Medians by what becomes of the call."""
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        times.setdefault("torch", []).append(host_us(call))
        for name, policy in (("off", "never"), ("left", "expected"), ("taken", "always")):
            with tritile.use_in_torch(policy):
                call()
                times.setdefault(name, []).append(host_us(call))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a table."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':24}{'torch':>8}{'off':>8}{'left':>8}{'taken':>8}  us")
    with torch.no_grad():
        for name, call in calls().items():
            found = measured(call)
            print(f"{name:24}" + "".join(f"{us:8.1f}" for us in found.values()))


if __name__ == "__main__":
    main()
