"""Fit the pages to the site that mkdocs builds: files they link outside docs/, code blocks, the notebook."""

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
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


def _name(path: str) -> str:
    """Return where the site has a file from outside docs/: a notebook is a page, others lie in files/."""
    name = path.removeprefix("../")
    return name if name.endswith(".ipynb") else f"files/{name}"


@event_priority(50)  # before mkdocs-jupyter, which makes pages of notebooks
def on_files(files: Any, config: Any) -> Any:
    """Add every file of the repository that a page links. A link to no file fails the build."""
    root = posixpath.dirname(config.docs_dir)
    for page in list(files.documentation_pages()):
        for link in _OUTSIDE.findall(page.content_string):
            path = _source(page.src_uri, link)
            name = _name(path)
            if not path.startswith("../") or files.get_file_from_path(name):
                continue
            if name.endswith(".ipynb"):
                files.append(
                    File(name, root, config.site_dir, config.use_directory_urls)
                )
            else:
                found = posixpath.join(root, path.removeprefix("../"))
                files.append(File.generated(config, name, abs_src_path=found))
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
        return f"]({posixpath.relpath(_name(path), posixpath.dirname(here) or '.')}"

    return re.sub(
        r"^```(\w+) .*$", r"```\1", _OUTSIDE.sub(inside, text), flags=re.MULTILINE
    )


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Point the notebook's links at pages; leave out MathJax, which it would load from the network."""
    here = page.file.src_uri
    if not here.endswith(".ipynb"):
        return html

    def inside(found: re.Match[str]) -> str:
        link, _, anchor = found[1].partition("#")
        target = files.get_file_from_path(_source(here, link).removeprefix("docs/"))
        if target is None:
            raise PluginError(f"{here} links {found[1]}, which is no page")
        return f'href="{target.url_relative_to(page.file)}{anchor and f"#{anchor}"}"'

    html = re.sub(r'<script src="https?://[^"]*">\s*</script>', "", html)
    html = re.sub(r'href="(?!\w+:|#)([^"]+)"', inside, html)
    html = html.replace(
        "No description has been provided for this image", "What the code above draws"
    )
    name = posixpath.basename(here)  # which the plugin puts next to the page
    return f'<p><a href="{name}" download>Download this notebook</a></p>\n{html}'
