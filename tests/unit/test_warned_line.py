"""Where warnings point: at the line that called tritile."""

import pytest

import tritile


def test_import_warning_points_at_line(tmp_path, monkeypatch):
    """Between the two lie frames of importlib, which `stacklevel` does not count."""
    (tmp_path / "imports_another.py").write_text("import tritile.warns_when_imported\n")
    (tmp_path / "warns_when_imported.py").write_text(
        "import warnings\nfrom tritile.errors import callers_level\n"
        "warnings.warn('a word', UserWarning, stacklevel=callers_level())\n"
    )
    monkeypatch.setattr(tritile, "__path__", [*tritile.__path__, str(tmp_path)])
    with pytest.warns(UserWarning, match="a word") as told:
        exec(compile("import tritile.imports_another", __file__, "exec"), {"__name__": "caller"})
    assert told[0].filename == __file__
