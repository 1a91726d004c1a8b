"""Hugging Face transformers: make an existing model scale-invariant, and keep everything else working.

Importing this registers our attention, mask, rotary types and config with transformers. Then:

    scaleinv.hf.convert(model)              in place; `revert` undoes it
    model.save_pretrained("out")            AutoModelForCausalLM.from_pretrained("out") brings it back
    scaleinv.hf.check(model)                tests it: cached = full, padded = unpadded, packed = split
    scaleinv.hf.stretch_to(model, 4096)     with stretch="yarn": open contexts for that many tokens
    scaleinv.hf.measure_scores(model, x)    means and variances of its scores, for convert(model, fit=...)
    scaleinv.hf.CertifiedCache(1e-3)        a cache for generate that reads only the keys which matter
"""

from __future__ import annotations

try:
    import transformers
except ImportError as error:
    raise ImportError('scaleinv.hf needs transformers: pip install "scaleinv[hf]"') from error

from transformers import AttentionInterface, AttentionMaskInterface

from scaleinv.hf import config, gpt, rope, stretch
from scaleinv.hf.attention import attention_forward
from scaleinv.hf.cache import CertifiedCache
from scaleinv.hf.check import CheckResult, check
from scaleinv.hf.convert import conversion, convert, convert_folder, revert
from scaleinv.hf.gpt import export
from scaleinv.hf.lm_eval import lm_eval_main
from scaleinv.hf.mask import attention_mask
from scaleinv.hf.scores import measure_scores
from scaleinv.hf.settings import Settings
from scaleinv.hf.stretch import stretch_to

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 22):  # the mask interface changed often
    raise ImportError(f"scaleinv.hf needs transformers 5.22 or newer, got {transformers.__version__}")

AttentionInterface.register(config.ATTENTION, attention_forward)
AttentionMaskInterface.register(config.ATTENTION, attention_mask)
config.register()
rope.register()
stretch.register()
gpt.register()

__all__ = [
    "CertifiedCache",
    "CheckResult",
    "Settings",
    "check",
    "conversion",
    "convert",
    "convert_folder",
    "export",
    "lm_eval_main",
    "measure_scores",
    "revert",
    "stretch_to",
]
