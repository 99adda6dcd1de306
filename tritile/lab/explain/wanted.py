"""Find a config by some of its parameters."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError
from tritile.families.registry import FAMILIES
from tritile.planning import model


def _parameters(config: Config) -> dict[str, str]:
    counts = {name: str(getattr(config, name)) for name in ("num_warps", "num_stages", "num_ctas")}
    return {"family": config.family, **{name: str(value) for name, value in config.kwargs}, **counts}


def _named(text: str) -> dict[str, str]:
    """Parse the parameters that a text names: "tile BLOCK_M=128 num_warps=8", by spaces or commas."""
    found: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=") if "=" in word else ("family", "=", word)
        if not (name.isidentifier() and value) or name in found:
            raise InvalidValueError(f"config {text!r}, at {word!r}: wanted NAME=VALUE, each name once")
        found[name] = value
    return found


def config_like(text: str, problem: Tiled, device: Device) -> Config:
    """Return the fastest predicted config that has every parameter that `text` names.

    Raises InvalidValueError, listing the values there are, where no config has them, and UnsupportedError
    where no config is legal at all.
    """
    found = model.ranked(problem, device)
    for name, value in _named(text).items():
        names = sorted({known for config in found for known in _parameters(config)})
        values = {own[name] for config in found if name in (own := _parameters(config))}
        found = [config for config in found if _parameters(config).get(name) == value]
        if not values:
            families = ", ".join(FAMILIES[problem.op])
            raise InvalidValueError(
                f"config {text!r}: there is no {name}; there are {', '.join(names)}; families are {families}"
            )
        if not found:
            among = ", ".join(sorted(values, key=lambda v: (int(v) if v.isdecimal() else 0, v)))
            raise InvalidValueError(
                f"config {text!r}: of the configs legal for {problem.label} on {device.name} that have what "
                f"is named before, none has {name} = {value}; there are {among}"
            )
    return found[0]
