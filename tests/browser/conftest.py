"""Pages opened in headless Chromium: none may complain, nor ask the network for anything."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start headless Chromium: the machine's own, else the one that playwright installed."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            if os.environ.get("TRITILE_BROWSER") == "required":
                raise
            pytest.skip(f"no Chromium here (make browser installs it): {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file as a page, `visit(path, width=..., dark=...)`; it may not complain until the test ends.

    Complaints are errors and warnings on the console, uncaught exceptions, and requests but for the file.
    """
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path, width: int = 1280, dark: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page, address = context.new_page(), path.resolve().as_uri()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == address or request.url.startswith(("data:", "blob:"))
                else complaints.append(f"asked for {request.url}")
            ),
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
