"""Figures as SVG inside a page: text that can be selected, and titles that appear where a mouse rests on a point."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import matplotlib as mpl
from markupsafe import escape
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

OUTSIDE = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->|\sxmlns(?::\w+)?=\"[^\"]*\"", re.DOTALL
)
"""What a file needs and a page does not."""

_titles: WeakKeyDictionary[Artist, Sequence[str]] = WeakKeyDictionary()


def hover(points: Line2D, titles: Sequence[str]) -> None:
    """Give every point of a line that has marks a title of its own."""
    _titles[points] = titles


def inline(figure: Figure, name: str, title: str) -> str:
    """The figure as an SVG element; ``name`` keeps its ids apart from those of other figures of the page."""
    marked = {f"hover-{k}": own for k, own in enumerate(figure.findobj(lambda artist: artist in _titles))}
    for gid, artist in marked.items():
        artist.set_gid(gid)
    text = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedgp"}):  # letters stay letters, ids the same
        figure.savefig(text, format="svg", metadata={"Date": None})
    page = OUTSIDE.sub("", text.getvalue().decode())
    for gid, artist in marked.items():
        page = _titled(page, gid, _titles[artist])
    page = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", page)
    width, height = (100 * side for side in figure.get_size_inches())
    size = rf'<svg role="img" aria-label="{escape(title)}" width="{width:.0f}" height="{height:.0f}"'
    return re.sub(r'<svg width="[^"]*" height="[^"]*"', size, page, count=1).strip()


def _titled(page: str, gid: str, titles: Sequence[str]) -> str:
    """The page with a title in each of a group's points, where none of them was left out for lying outside."""
    before, mark, rest = page.partition(f'<g id="{gid}">')
    points, end, after = rest.partition("</g>")
    if points.count("<use ") != len(titles):
        return page
    left = iter(titles)
    points = re.sub(r"(<use [^>]*)/>", lambda use: f"{use[1]}><title>{escape(next(left))}</title></use>", points)
    return before + mark + points + end + after
