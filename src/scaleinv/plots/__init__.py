"""Figures from the numbers of `scaleinv.analysis`. Needs matplotlib: ``pip install scaleinv[plots]``.

- `style`: one look for all figures: a colour for each method, fonts, saving as PNG and SVG
- `theory`: figures 1 (top), 2 and 6
- `model`: figure 1 (bottom), attention by range, and QQ-plots as in figures 9 – 14
"""
