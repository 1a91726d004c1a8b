"""Colours on a dark page."""

from scaleinv.plots import style
from scaleinv.reports import colors


def test_colours_can_be_read_on_dark_pages() -> None:
    assert colors.on_dark("#000000") == "#F5F5F5"
    for look in style.METHODS.values():
        assert colors.contrast(colors.on_dark(look.color), colors.DARK_PAGE) >= 3
