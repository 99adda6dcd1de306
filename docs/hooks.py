"""Fit the pages to the site that mkdocs builds: files they link outside docs/, and marked code blocks."""

import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")
_OUTSIDE = re.compile(
    r"\]\((\.\./[^)#\s]+)"
)  # whether it leaves docs/ depends on the page's folder


def _source(page: str, link: str) -> str:
    """Return the path of a link from docs/: it begins with ../ where it leaves docs/."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _from_outside(page: str, found: re.Match[str]) -> str:
    """Return a link of a page from outside docs/: one into docs/ as the site has it, of others the text."""
    path = posixpath.normpath(
        posixpath.join(posixpath.dirname(page.removeprefix("files/")), found[2])
    )
    if not path.startswith("docs/"):
        return found[1]
    return f"[{found[1]}]({posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(page))})"


def on_files(files: Any, config: Any) -> Any:
    """Add every file of the repository that a page links, under files/. A link to no file fails the build."""
    for page in list(files.documentation_pages()):
        for link in _OUTSIDE.findall(page.content_string):
            path = _source(page.src_uri, link)
            name = f"files/{path.removeprefix('../')}"
            if path.startswith("../") and files.get_file_from_path(name) is None:
                found = posixpath.join(config.docs_dir, path)
                files.append(
                    File.generated(config, name, abs_src_path=posixpath.normpath(found))
                )
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Point links at the files added above; leave out words behind a block's language, which tests read."""
    here = page.file.src_uri
    if here.startswith("files/"):
        return _LINK.sub(lambda found: _from_outside(here, found), text)

    def inside(found: re.Match[str]) -> str:
        path = _source(here, found[1])
        if not path.startswith("../"):
            return found[0]
        return "](" + posixpath.relpath(
            f"files/{path.removeprefix('../')}", posixpath.dirname(here) or "."
        )

    return re.sub(
        r"^```(\w+) .*$", r"```\1", _OUTSIDE.sub(inside, text), flags=re.MULTILINE
    )
