"""Check that the snippets of docs/stories.md run. `test_documents.py` checks the commands that it names."""

import re
import warnings
from pathlib import Path

import tritile

PAGE = (Path(tritile.__file__).parents[1] / "docs" / "stories.md").read_text()
STORIES = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_stories_are_short():
    assert len(STORIES) == 3
    assert all(len(story.splitlines()) <= 35 for story in STORIES)


def test_the_snippets_run_in_order(capsys):
    names = {}
    with warnings.catch_warnings():
        for snippet in SNIPPETS:
            exec(snippet.replace('"cuda"', '"cpu"'), names)
    assert "predicted" in capsys.readouterr().out
    assert names["y"].shape == (5, 4096)
