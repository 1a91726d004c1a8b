"""What a trained model can do: loss by length, the comparison of all methods, generated text."""

from scaleinv.eval.compare import Comparison, compare
from scaleinv.eval.generation import generate
from scaleinv.eval.loss import Evaluation, evaluate

__all__ = ["Comparison", "Evaluation", "compare", "evaluate", "generate"]
