"""Is there such a model: a folder, or an id on the Hugging Face hub? Answered within seconds, before anything heavy.

transformers would ask the hub again and again, for half a minute where there is no network.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

ANSWER = 2.0
"""Seconds within which the hub must answer."""


def check_source(source: str | os.PathLike[str]) -> None:
    """ValueError unless ``source`` is a folder, is in the hub's cache, or is a model that the hub knows."""
    name = os.fspath(source)
    if Path(name).is_dir():
        return
    if Path(name).exists():
        raise ValueError(f"{name} must be a model's folder, got a file")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ImportError('Hugging Face models need transformers: pip install "scaleinv[hf]"') from error
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a folder nor the id of a model on the Hugging Face hub") from error
    problem = None if cached else _problem(name)
    if problem is not None:
        raise ValueError(f"{name} is not a folder, and the Hugging Face hub {problem}")


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _problem(name: str) -> str | None:
    """Why the hub does not give us the model; None if it does."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return "is not asked (HF_HUB_OFFLINE is set)"
    answers: list[str | None] = [f"cannot be reached (no answer in {ANSWER:g} seconds)"]

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=ANSWER)
            answers.append(None)
        except HfHubHTTPError as error:
            code = error.response.status_code
            answers.append("has no public model of that name" if code in (401, 404) else f"refuses it (HTTP {code})")
        except Exception as error:
            answers.append(f"cannot be reached ({reason(error)})")

    thread = threading.Thread(target=ask, daemon=True)  # looking up a host's name has no time limit
    thread.start()
    thread.join(ANSWER)
    return answers[-1]
