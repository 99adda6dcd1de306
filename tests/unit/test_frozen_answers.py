"""Answers to host tensors are those of tests/frozen.json, which `python tests/freeze.py` writes."""

import pytest

from tests import freeze

pytestmark = pytest.mark.interpreted


def test_answers_are_the_frozen_ones():
    changed = freeze.changed_answers()
    assert not changed, changed
