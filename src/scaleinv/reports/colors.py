"""Colours of the figures on a dark page."""

from __future__ import annotations

import math

DARK_PAGE = "#15181C"
"""The page in the dark: --page in page.css."""


def on_dark(color: str) -> str:
    """A colour for dark pages: greys are mirrored, so that black is near-white, and dark hues are mixed with white.

    >>> on_dark("#000000"), on_dark("#DDCC77")
    ('#F5F5F5', '#DDCC77')
    """
    red, green, blue = _rgb(color)
    if red == green == blue:
        return "#" + f"{max(245 - red, 110):02X}" * 3
    while contrast(color, DARK_PAGE) < 4:
        red, green, blue = (value + math.ceil((255 - value) / 20) for value in (red, green, blue))
        color = f"#{red:02X}{green:02X}{blue:02X}"
    return color


def contrast(first: str, second: str) -> float:
    """Of two colours, 1 – 21, as the WCAG define it."""
    low, high = sorted(_luminance(color) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    """Relative, 0 – 1."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (x / 255 for x in _rgb(color))]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
