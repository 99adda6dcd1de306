"""Pages opened in headless Chromium: any that a test opens must not complain, nor ask for anything."""

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


@pytest.fixture(scope="session")
def idle() -> list[Any]:
    """Pages that no test uses: a new one takes as long as most tests."""
    return []


@pytest.fixture
def visit(browser: Any, idle: list[Any]) -> Iterator[Callable[..., Any]]:
    """Open a file as a page, `visit(path, width=..., dark=...)`; look for complaints afterwards.

    Complaints are errors and warnings on the console, uncaught exceptions, and any request but for the file
    itself (data: and blob: stay in the page).
    """
    complaints: list[str] = []
    used = []

    def open_page(path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        page = idle.pop() if idle else browser.new_context().new_page()
        address = path.resolve().as_uri()
        heard = {
            "console": lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None,
            "pageerror": lambda error: complaints.append(str(error)),
            "request": lambda request: (
                None
                if request.url.split("#")[0] == address or request.url.startswith(("data:", "blob:"))
                else complaints.append(f"asked for {request.url}")
            ),
        }
        for event, hear in heard.items():
            page.on(event, hear)
        used.append((page, heard))
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion="no-preference")
        page.goto(address)
        return page

    yield open_page
    for page, heard in used:
        page.goto("about:blank")
        for event, hear in heard.items():
            page.remove_listener(event, hear)
        idle.append(page)
    assert complaints == []
