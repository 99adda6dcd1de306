"""What torch takes for products that were measured beside tritile: a JSON file for each GPU model.

`tritile/tables/<gpu>.peers.json` is made by `tuning/export_peers.py` of the lines of results in
`tuning/results/<gpu>/`. An entry is a problem, where tritile's config came from, and both times, in
microseconds: medians of runs side by side, on cold operands.
"""

import functools
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any, Final, NamedTuple

from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, doublings, problem_from_dict, problem_to_dict
from tritile.errors import InvalidValueError, StoreWarning

FORMAT: Final = 1


class Peer(NamedTuple):
    """A product, microseconds that tritile and torch take for it, and where tritile's config came from."""

    problem: MatmulProblem
    tritile_us: float
    torch_us: float
    source: str

    @property
    def ratio(self) -> float:
        """torch's time by tritile's: above 1, tritile is faster."""
        return self.torch_us / self.tritile_us


def alike(problem: MatmulProblem) -> tuple[Any, ...]:
    """All but sizes of a product, alignments only as far as they tell which kernels it gets.

    The least aligned operand does, and the result where it is aligned less still. cuBLAS has kernels for each
    number of bytes, and takes one for the least aligned of the three: on an H200 it makes 102 to 157 TFLOP/s
    of products of 18 GFLOP and more with any of them on 2 bytes, be the others on 2, 4 or 8, and 153 to 258
    with none (`ragged`, `llama`). tritile copies operands that do not start on 16 bytes, or loads them
    element by element.
    """
    least = min(problem.a_align, problem.b_align)
    return replace(problem, a_align=least, b_align=least, out_align=min(least, problem.out_align)).kind


class Peers:
    """The measured products of one GPU model."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self.known: Final = {peer.problem: peer for peer in peers}
        self._kinds: dict[Any, list[Peer]] = {}
        self._alike: dict[Any, list[Peer]] = {}
        for peer in self.known.values():
            self._kinds.setdefault(peer.problem.kind, []).append(peer)
            self._alike.setdefault(alike(peer.problem), []).append(peer)

    def exactly(self, problem: MatmulProblem) -> Peer | None:
        """The peer of just this problem, None where it was not measured."""
        return self.known.get(problem)

    def nearest(self, problem: MatmulProblem, within: float) -> Peer | None:
        """The nearest in sizes, at most `within` doublings away; of several, the one best for torch.

        Of the problems that differ in sizes alone; where none is near, of those that are `alike`.
        """
        for known in (self._kinds.get(problem.kind, ()), self._alike.get(alike(problem), ())):
            far = [(doublings(problem, peer.problem), peer.ratio, peer) for peer in known]
            distance, _, peer = min(far, key=lambda each: each[:2], default=(math.inf, 0.0, None))
            if distance <= within:
                return peer
        return None


def to_text(name: str, peers: Iterable[Peer]) -> str:
    """The file of these peers, measured on the GPU model of this name: an entry a line, by problem."""
    ordered = sorted(peers, key=lambda peer: (peer.problem.sizes, peer.problem.kind))
    entries = [json.dumps(peer._asdict() | {"problem": problem_to_dict(peer.problem)}) for peer in ordered]
    head = f'"format": {FORMAT},\n"device": {json.dumps(name)},\n"entries": [\n'
    return "{\n" + head + ",\n".join(entries) + "\n]\n}\n"


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidValueError(f"a time is {value!r}: wanted microseconds, above 0")
    return float(value)


def _peer(entry: Any) -> Peer:
    if not isinstance(entry, Mapping) or set(entry) != set(Peer._fields):
        raise InvalidValueError(f"{str(entry)[:80]!r} is no entry: wanted {', '.join(Peer._fields)}")
    problem = problem_from_dict(entry["problem"])
    if not isinstance(problem, MatmulProblem):
        raise InvalidValueError(f"{problem.op} is no matmul")
    if not isinstance(entry["source"], str):
        raise InvalidValueError(f"a source is {entry['source']!r}: wanted a word")
    return Peer(problem, _time(entry["tritile_us"]), _time(entry["torch_us"]), entry["source"])


def from_text(text: str, name: str) -> Peers:
    """The peers in a file of the GPU model of this name. Raises InvalidValueError where there are none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"peers of {name} are no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("device") != name:
        raise InvalidValueError(f"peers of {name}: wanted format {FORMAT} and that device")
    if not isinstance(data.get("entries"), list):
        raise InvalidValueError(f"peers of {name}: wanted a list of entries")
    return Peers(map(_peer, data["entries"]))


@functools.cache
def _shipped(slug: str, name: str) -> Peers:
    file = resources.files("tritile") / "tables" / f"{slug}.peers.json"
    if not file.is_file():
        return Peers()
    try:
        return from_text(file.read_text(), name)
    except (OSError, UnicodeDecodeError, InvalidValueError) as error:
        warnings.warn(f"shipped times of torch are not used: {error}", StoreWarning, stacklevel=4)
        return Peers()


def shipped(device: Device) -> Peers:
    """What the package ships for this GPU model; read once."""
    return _shipped(device.slug, device.name)
