"""Figures and tables from the numbers of `scaleinv.analysis` and `scaleinv.eval`.

Figures need matplotlib: ``pip install scaleinv[plots]``.

- `style`: one look for all figures: a colour for each method, fonts, saving as PNG and SVG
- `theory`: figures 1 (top), 2 and 6
- `model`: figure 1 (bottom), attention by range, and QQ-plots as in figures 9 – 14
- `needle`: heat-maps of needle accuracy, depth × length
- `chart`: curves in panels, as a figure and for the report's page
- `compare`: the charts of a comparison: loss by length and by position, training curves, the sweep of τ, needles
- `tables`: the tables of a comparison, as text, Markdown, CSV and JSON
- `units`: what a loss is measured in
- `paper`: the paper's own numbers
"""
