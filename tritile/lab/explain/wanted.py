"""Find a config by some of its parameters."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError
from tritile.families.registry import FAMILIES
from tritile.planning import model

_COUNTS = ("num_warps", "num_stages", "num_ctas")


def _parameters(config: Config) -> dict[str, object]:
    counts = {name: getattr(config, name) for name in _COUNTS}
    return {"family": config.family, **dict(config.kwargs), **counts}


def _value(text: str) -> int | bool | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text


def _named(text: str) -> dict[str, int | bool | str]:
    """Parse the parameters that a text names: "tile BLOCK_M=128 num_warps=8", by spaces or commas."""
    found: dict[str, int | bool | str] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals:
            name, value = "family", word
        if not (name.isidentifier() and value) or name in found:
            raise InvalidValueError(f"config {text!r}, at {word!r}: wanted NAME=VALUE, each name once")
        found[name] = _value(value)
    return found


def config_like(text: str, problem: Tiled, device: Device) -> Config:
    """Return the fastest predicted config that has every parameter that `text` names.

    Raises InvalidValueError, listing the values there are, where no config has them, and UnsupportedError
    where no config is legal at all.
    """
    found = model.ranked(problem, device)
    for name, value in _named(text).items():
        names = sorted({known for config in found for known in _parameters(config)})
        values = {_parameters(config).get(name) for config in found} - {None}
        found = [config for config in found if _parameters(config).get(name) == value]
        if not values:
            families = ", ".join(FAMILIES[problem.op])
            raise InvalidValueError(
                f"config {text!r}: there is no {name}; there are {', '.join(names)}; families are {families}"
            )
        if not found:
            among = ", ".join(map(str, sorted(values, key=lambda value: (str(type(value)), value))))
            raise InvalidValueError(
                f"config {text!r}: of the configs legal for {problem.label} on {device.name} that have what "
                f"is named before, none has {name} = {value}; there are {among}"
            )
    return found[0]
