"""`scaleinv-eval`: EleutherAI's lm-evaluation-harness, with converted models."""

from __future__ import annotations


def lm_eval_main() -> None:
    """lm-eval's own command line. Its models only need `scaleinv.hf` to be imported, as it is here."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit('scaleinv-eval needs lm-eval: pip install "scaleinv[lm-eval]"') from error
    cli_evaluate()
