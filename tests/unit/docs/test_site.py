"""The documentation site builds without a broken link, and works from a folder without a network."""

import re
import shutil
from pathlib import Path

import pytest
from docs import site

ROOT = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\((?!https?://)(?P<page>[^)#\s]*)#(?P<anchor>[^)\s]+)\)")


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(prose(page))]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_anchors_lead_somewhere():
    checked = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for link in ANCHOR.finditer(page.read_text()):
            target = (page.parent / link["page"]).resolve() if link["page"] else page
            assert link["anchor"] in anchors(target), f"{page.name}: {link[0]}"
            checked += 1
    assert checked > 5


def test_lists_are_lists_on_the_site_too():
    """What belongs to an item of a list is indented by four: GitHub takes less, the site does not."""
    wrong = re.compile(r"^ {2,3}(?:[-*]|\d+\.) |^(?:[-*]|\d+\.) [^\n]*\n\n {1,3}\S", re.MULTILINE)
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert [page.name for page in pages if wrong.search(prose(page))] == []


def test_every_page_is_in_the_navigation():
    flat = []
    for entry in site.navigation():
        flat += next(iter(entry.values())) if isinstance(entry, dict) else [entry]
    assert sorted(flat) == sorted(str(page.relative_to(site.DOCS)) for page in site.DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def first_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first page of the built site; a broken link or anchor raises."""
    return site.build_site(tmp_path_factory.mktemp("site"))


def test_nothing_is_loaded_from_a_network(first_page: Path):
    """Scripts, style sheets, pictures and fonts of every page are files of the site."""
    loads = re.compile(
        r'<(?:script|img|link rel="(?:stylesheet|icon|preconnect)")[^>]*(?:src|href)="?(https?:)'
    )
    pages = list(first_page.parent.rglob("*.html"))
    assert len(pages) > 80 and [page.name for page in pages if loads.search(page.read_text())] == []


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt install chromium)")
def test_the_search_works_from_a_folder(first_page: Path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    asked: list[str] = []
    with playwright.sync_playwright() as running:
        page = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(first_page.as_uri())
        results = page.locator(".md-search-result__item")
        for _ in range(120):  # what is typed before the index is loaded finds nothing
            page.locator("input.md-search__input").fill("")
            page.locator("input.md-search__input").press_sequentially("reduce-scatter")  # it listens to keys
            page.wait_for_timeout(500)
            if results.count():
                break
        assert results.count()
    assert [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] == []
