"""HTML for notebooks: tables, lists and pictures, with every text escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import count

from meshwright import svg

_STYLE = (
    f".mw{{font-family:{svg.FONT};font-size:13px;line-height:1.45;max-width:980px}}"
    ".mw table{border-collapse:collapse;margin:6px 0}"
    ".mw td,.mw th{padding:2px 12px 2px 0;text-align:right;white-space:nowrap}"
    ".mw th{font-weight:600;border-bottom:1px solid #8895a3}"
    ".mw td.text,.mw th.text{text-align:left;white-space:normal}"
    ".mw svg{display:block;width:100%;max-width:940px;margin:6px 0}"
)


def fragment(*parts: str) -> str:
    """One piece of HTML with its own style, as `_repr_html_` returns it."""
    style = f"<style>{_STYLE}{svg.style_sheet()}</style>"
    return f'{style}<div class="mw">{"".join(parts)}</div>'


def heading(text: str) -> str:
    """A short bold line."""
    return f"<p><b>{escape(text)}</b></p>"


def paragraph(text: str) -> str:
    """A line of text."""
    return f"<p>{escape(text)}</p>"


def listing(items: Iterable[str]) -> str:
    """Sentences, one per line; nothing for none of them."""
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{lines}</ul>" if lines else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: Sequence[int] = ()) -> str:
    """A table; numbers are aligned right, the columns named here left."""

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = (' class="text"' if index in text_columns else "" for index in count())
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(row, marks, strict=False))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"
