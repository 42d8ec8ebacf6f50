"""Pages for people: links lead somewhere, commands exist, run files are valid."""

import re
from pathlib import Path

import pytest

from meshwright.cli.main import VERBS
from meshwright.errors import SpecError
from meshwright.spec.text import parse_run

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CLI_PAGE = (ROOT / "docs/reference/cli.md").read_text()
RUN_PAGE = (ROOT / "docs/reference/run.md").read_text()
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
COMMAND = re.compile(r"^(?:    |\$ |`)meshwright ([a-z]+)", re.MULTILINE)
YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path):
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_verbs_are_real(page: Path):
    assert set(COMMAND.findall(page.read_text())) <= set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_options_and_keys_of_commands_are_real(page: Path):
    """Every `--option` is in the help of its verb, and every dotted key is one of a run file."""
    verbs = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", CLI_PAGE, re.MULTILINE | re.DOTALL))
    for verb, rest in re.findall(r"^ *(?:\$ )?meshwright ([a-z]+)([^\n#`]*)", page.read_text(), re.MULTILINE):
        unknown = [option for option in re.findall(r"--[a-z][a-z-]*", rest) if option not in verbs[verb]]
        unknown += [key for key in re.findall(r"\b((?:\w+\.)+\w+)=", rest) if f"`{key}`" not in RUN_PAGE]
        assert not unknown, (verb, unknown)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    pages = [page for page in names(PAGES) if page.startswith("docs/") and "decisions/" not in page]
    missing = [page for page in pages if page.removeprefix("docs/") not in index and page != "docs/README.md"]
    assert not missing


def test_decisions_are_dated_and_listed_by_their_titles():
    """The day in a page's name is the day on the page; the list shows each page once, with its title."""
    titles = {}
    for page in (ROOT / "docs/decisions").glob("2*.md"):
        title, _, day, *_ = page.read_text().splitlines()
        assert page.name.startswith(f"{day}-"), page.name
        titles[page.name] = title.removeprefix("# ")
    index = (ROOT / "docs/decisions/README.md").read_text()
    listed = {name: title for title, name in re.findall(r"^- \[(.*)\]\((.*)\)$", index, re.MULTILINE)}
    assert listed == titles


def test_the_tour_names_every_package_and_every_folder_of_tests():
    tour = (ROOT / "CONTRIBUTING.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src/meshwright").glob("*/__init__.py")]
    parts = [path.parent.name for path in (ROOT / "src/meshwright/plan").glob("*/__init__.py")]
    modules = [path.name for path in (ROOT / "src/meshwright").glob("[a-z]*.py")]
    folders = [f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if list(path.glob("**/*.py"))]
    wanted = [*(f"{name}/" for name in [*packages, *parts]), *modules, *folders]
    assert [name for name in wanted if f"`{name}`" not in tour] == []


def test_run_files_on_pages_are_valid():
    checked = 0
    for page in PAGES:
        for text in YAML.findall(page.read_text()):
            if "schedule:" in text:  # a whole run file; others show a part
                checked += 1
                try:
                    parse_run(text, place=str(page)).require_valid()
                except SpecError as error:
                    pytest.fail(f"{page}: {error}")
    assert checked >= 1
