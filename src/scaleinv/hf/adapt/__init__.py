"""Adapt a pretrained model: convert it, continue its training on `transformers.Trainer`, and see what it brought.

    from scaleinv.adaptation import AdaptConfig
    from scaleinv.hf.adapt import adapt

    adapt(AdaptConfig(model="path/to/model", data="books/", tokens="50M", out="runs/adapt"))

- `data`      text and shards as the model's own tokens
- `variants`  a model converted to a variant
- `training`  continued training of one model, resumed after a kill
- `measure`   loss by length
- `folders`   what is done, and what it was done with
- `run`       all of it
"""

from scaleinv.hf.adapt.run import adapt

__all__ = ["adapt"]
