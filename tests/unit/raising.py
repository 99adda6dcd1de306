"""A module that cannot be imported."""

raise RuntimeError("not for import")
