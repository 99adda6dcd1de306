"""Warnings that tests expect, counted apart from those that garbage of other tests may cause meanwhile."""

import contextlib
import warnings
from collections.abc import Iterator

from tritile.errors import StoreWarning


@contextlib.contextmanager
def one_warning(match: str, category: type[Warning] = StoreWarning) -> Iterator[None]:
    """What is inside warns once of this category, with this in its text; other categories do not count."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(each.message) for each in caught if issubclass(each.category, category)]
    assert len(texts) == 1, texts
    assert match in texts[0]
