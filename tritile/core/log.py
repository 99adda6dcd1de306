"""Log what is planned, compiled and measured, by Python's `logging`; nothing of it is on the warm path.

`TRITILE_LOG`, a level's name, is read as this module is imported. It sets the level of the logger "tritile",
which then writes to stderr, unless the program has set up handlers of its own.
"""

import json
import logging
import os
import warnings
from typing import Final, Literal

from torch.compiler import is_dynamo_compiling

from tritile.errors import SettingWarning, callers_level

FIELDS: Final = ("kernel", "problem", "config", "source", "device", "us", "seconds", "failure")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


def is_logged(about: Literal["plan", "compile", "tune"], level: int) -> bool:
    # A logger's methods break torch.compile's graph.
    return not is_dynamo_compiling() and logging.getLogger(f"tritile.{about}").isEnabledFor(level)


def log(
    about: Literal["plan", "compile", "tune"], level: int, text: str = "", **facts: str | float | None
) -> None:
    """Log facts, each an attribute of the record; those of `FIELDS` that are missing are None there.

    The message is `text`, by default the facts as name=value pairs.
    """
    if is_logged(about, level):
        text = text or " ".join(
            f"{name}={_shown(value)}" for name, value in facts.items() if value is not None
        )
        fields = dict.fromkeys(FIELDS) | facts
        logging.getLogger(f"tritile.{about}").log(level, "%s", text, extra=fields, stacklevel=2)


def _shown(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:.3f}"
    is_plain = text.isprintable() and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def set_up() -> None:
    """Do what `TRITILE_LOG` says. Any other word gets a SettingWarning: importing must not fail for it."""
    word = os.environ.get("TRITILE_LOG", "")
    if word.upper() in _LEVELS:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        # At each record, as a program may set up its handlers after importing tritile.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger = logging.getLogger("tritile")
        logger.setLevel(word.upper())
        logger.addHandler(handler)
    elif word:
        text = f"TRITILE_LOG is {word!r}: expected one of {', '.join(_LEVELS).lower()}; nothing is logged"
        warnings.warn(text, SettingWarning, stacklevel=callers_level())


set_up()
