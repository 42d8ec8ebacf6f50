"""Builds the documentation as a site that needs no network: `python docs/site.py`, or `make docs`.

The pages of docs, and what they link to elsewhere in the tree, are copied to build/docs with links that fit,
and mkdocs makes build/site of them. A link or an anchor that leads nowhere ends the build.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BUILD = ROOT / "build"
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)(?P<path>[^)#\s]+)")
# Sections of the navigation, by folder.
SECTIONS = {
    "Tutorials": "tutorials",
    "Guides": "guides",
    "Concepts": "concepts",
    "Reference": "reference",
    "Decisions": "decisions",
}


def main() -> None:
    """Build the site."""
    print(f"the site is {build_site(BUILD)}", file=sys.stderr)


def build_site(folder: Path) -> Path:
    """Build the site in `folder`/site; returns its first page."""
    source, site = folder / "docs", folder / "site"
    copy_sources(source)
    config = load_config(
        str(ROOT / "mkdocs.yml"), docs_dir=str(source), site_dir=str(site), strict=True, nav=navigation()
    )
    build(config)
    return site / "index.html"


def copy_sources(source: Path) -> None:
    """Copy every page and every file that a page links to."""
    shutil.rmtree(source, ignore_errors=True)
    waiting = [
        path for path in sorted(DOCS.rglob("*")) if path.suffix in (".md", ".svg", ".png", ".js", ".css")
    ]
    copied: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in copied:
            continue
        copied.add(path)
        target = source / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(LINK.sub(lambda link, page=path: moved(link["path"], page), path.read_text()))
            waiting += linked(path)
        else:
            shutil.copyfile(path, target)


def place(path: Path) -> Path:
    """Where a file of the tree is in the site: docs is its root."""
    return path.relative_to(DOCS) if path.is_relative_to(DOCS) else path.relative_to(ROOT)


def moved(link: str, page: Path) -> str:
    """A relative link of a page as it is between the copies."""
    target = (page.parent / link).resolve()
    return os.path.relpath(place(target), place(page).parent)


def linked(page: Path) -> list[Path]:
    """The files that a page links to."""
    targets = [(page.parent / link["path"]).resolve() for link in LINK.finditer(page.read_text())]
    return [target for target in targets if target.is_file()]


def navigation() -> list[object]:
    """Sections with their pages, in the order of docs/README.md; pages that it does not name come last."""
    all_pages = (DOCS / "README.md").read_text().split("## All pages")[1]
    index = [link["path"] for link in LINK.finditer(all_pages)]
    sections: list[object] = ["README.md", "start.md"]
    for title, folder in SECTIONS.items():
        pages = [str(path.relative_to(DOCS)) for path in sorted((DOCS / folder).glob("*.md"))]
        pages.sort(
            key=lambda page: (index.index(page) if page in index else len(index), "README" not in page)
        )
        sections.append({title: [*pages, "notation.md", "policy.md"] if folder == "reference" else pages})
    return sections


if __name__ == "__main__":
    main()
