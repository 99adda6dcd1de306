"""The harness itself: pages that complain, or ask for something, are found out."""

import pytest

PAGES = {
    "error": "<script>console.error('it failed')</script>",
    "exception": "<script>null.x</script>",
    "request": "<script>fetch('http://127.0.0.1:9/x').catch(() => 0)</script>",
}


@pytest.mark.parametrize("fault", PAGES)
def test_a_faulty_page_is_found_out(browser, idle, tmp_path, fault):
    from tests.browser import conftest

    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><title>x</title>{PAGES[fault]}")
    opened = conftest.visit.__wrapped__(browser, idle)
    page = next(opened)(path)
    page.wait_for_timeout(200)
    with pytest.raises(AssertionError):
        next(opened)
