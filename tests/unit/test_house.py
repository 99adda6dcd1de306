"""What is read first stays plain: docstrings begin with a verb, functions are short."""

import ast

from tests import house

# Options of a command, or arguments of a decorator, a line each.
LONG_FUNCTIONS = {"compile_", "tune", "autotune"}


def test_docstrings_begin_with_a_verb():
    assert not [str(found) for found in house.dangling()]


def test_functions_are_short():
    kernels, host = house.long_functions()
    assert kernels == []
    assert {found.text.partition(":")[0] for found in host} <= LONG_FUNCTIONS
    assert len(host) <= len(LONG_FUNCTIONS)


def test_lines_of_a_docstring_do_not_count():
    (function,) = ast.parse('def f():\n    """Return 1.\n\n    Always.\n    """\n    return 1\n').body
    assert house.code_lines(function) == 2


def test_the_table_counts_what_is_there():
    counts = dict(house.table())
    assert all(isinstance(count, int) for count in counts.values())
    assert (
        counts["lines in tritile/, Python"] > counts["lines in tritile/ without lab and files of kernels"] > 0
    )
