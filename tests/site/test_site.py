"""The built documentation site in a real browser: every page loads alone, in both themes, and search finds keys."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")

sync_api = pytest.importorskip("playwright.sync_api", reason="the docs group is not installed; nox -s docs does it")
if os.environ.get("CI") and not BROWSER:
    pytest.fail("CI must have Chromium", pytrace=False)
if not BROWSER:
    pytest.skip("no Chromium on this machine", allow_module_level=True)
if not (SITE / "index.html").exists():
    pytest.fail("the site is not built; nox -s docs builds it", pytrace=False)

PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.name != "404.html")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve the site without writing a log."""

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the built site on a free port of the loopback interface."""
    handler = functools.partial(Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    # Chromium refuses its sandbox to root, who runs CI; --disable-background-networking keeps its own traffic out.
    args = ["--no-sandbox", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=args)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address) -> Iterator[sync_api.Page]:
    """Return a fresh page that remembers what it asked for and what went wrong: page.asked and page.wrong."""
    context = browser.new_context(color_scheme="light")
    page = context.new_page()
    page.asked, page.wrong = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on(
        "console", lambda message: page.wrong.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on(
        "response", lambda answer: page.wrong.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
    )
    yield page
    context.close()


def test_every_page_loads_without_foreign_requests_or_errors(page, address):
    assert len(PAGES) >= 8
    for name in PAGES:
        page.goto(f"{address}/{name}", wait_until="networkidle")
        assert page.locator("h1").first.inner_text().strip(), name
    assert {url for url in page.asked if not url.startswith((address, "data:", "blob:"))} == set()
    assert page.wrong == []


def test_every_link_between_pages_leads_somewhere(page, address):
    targets = {}
    for name in PAGES:
        page.goto(f"{address}/{name}")
        found = page.eval_on_selector_all("article a[href]", "links => links.map(link => link.href)")
        targets[name] = {url for url in found if url.startswith(address)}
    ids = {}
    for url in set().union(*targets.values()):
        place, _, anchor = url.partition("#")
        if place not in ids:
            assert page.goto(place).ok, place
            ids[place] = set(page.eval_on_selector_all("[id]", "nodes => nodes.map(node => node.id)"))
        assert not anchor or anchor in ids[place], url


def test_search_finds_a_key_of_the_reference(page, address):
    page.goto(f"{address}/index.html", wait_until="networkidle")
    page.keyboard.press("/")
    page.locator("input:visible").first.press_sequentially("expert_lookahead", delay=30)
    hit = page.locator("a").filter(has_text="prefetch_strategy").first
    hit.wait_for(timeout=10_000)
    hit.click()
    page.wait_for_url("**/reference.html**")
    assert page.wrong == []


def test_the_system_setting_and_the_switch_choose_the_theme(browser, address):
    background = "() => getComputedStyle(document.body).backgroundColor"
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(f"{address}/index.html", wait_until="networkidle")
    dark = page.evaluate(background)
    page.locator("label[for^=__palette]:visible").first.click()
    light = page.evaluate(background)
    assert sum(json.loads(dark.replace("rgb", "").replace("(", "[").replace(")", "]"))) < 200
    assert sum(json.loads(light.replace("rgb", "").replace("(", "[").replace(")", "]"))) > 600
    page.reload(wait_until="networkidle")
    assert page.evaluate(background) == light, "the choice is kept"
    context.close()


def test_no_page_is_wider_than_a_phone(browser, address):
    context = browser.new_context(viewport={"width": 360, "height": 740})
    page = context.new_page()
    for name in PAGES:
        page.goto(f"{address}/{name}", wait_until="networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
    context.close()
