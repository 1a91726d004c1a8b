"""Figures, tables and reports from the numbers of `scaleinv.analysis` and `scaleinv.eval`.

Figures need matplotlib: ``pip install scaleinv[plots]``.

- `style`: one look for all figures: a colour for each method, fonts, saving as PNG and SVG
- `theory`: figures 1 (top), 2 and 6
- `model`: figure 1 (bottom), attention by range, and QQ-plots as in figures 9 – 14
- `needle`: heat-maps of needle accuracy, depth × length
- `compare`: the charts of a comparison: loss by length and by position, training curves, the sweep of τ, needles
- `tables`: the tables of a comparison beside the paper's, as text, Markdown, CSV and JSON
- `report`: all of a comparison in one self-contained page
"""
