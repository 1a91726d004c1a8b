"""What a trained model can do."""

from scaleinv.eval.generation import generate

__all__ = ["generate"]
