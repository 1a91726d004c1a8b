"""Pages and folders made of numbers and figures.

- `theory`: what Gaussian scores show: figures 1 (top), 2 and 6, and the paper's definitions, checked
- `model`: what a trained model shows: figures 1 (bottom) and 9 – 14
- `comparison`: a comparison as one self-contained page, with its figures and tables; `page` has the pieces
- `folder`: results of two models do not mix in a folder
"""

from scaleinv.reports.comparison import write_report
from scaleinv.reports.model import analyze_model, model_report
from scaleinv.reports.theory import theory_report

__all__ = ["analyze_model", "model_report", "theory_report", "write_report"]
