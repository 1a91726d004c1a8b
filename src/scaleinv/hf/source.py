"""Load a model from a folder or from the Hugging Face hub, with an error that says in one line what is wrong."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from scaleinv.hub import check_source, reason


def load_pretrained(source: str | os.PathLike[str], dtype: torch.dtype | str = "auto") -> Any:
    """A causal language model from a folder, or by its id on the hub.

    Its weights are of type ``dtype``, or of that in which they were saved; the rotary's frequencies stay float32.
    Raises ValueError that names ``source`` if there is no such model, if its files are damaged, or if
    it lacks weights that its config asks for.
    """
    check_source(source)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except ImportError:
        raise
    except Exception as error:  # whatever transformers and safetensors make of a damaged file
        raise ValueError(f"{os.fspath(source)} cannot be loaded: {reason(error)}") from error
    model, found = loaded
    missing = sorted(found["missing_keys"])  # transformers draws them at random
    if missing:
        few = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"{os.fspath(source)} lacks weights that its config asks for: {few}")
    return model
