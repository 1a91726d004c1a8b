import dataclasses
from pathlib import Path

import pytest

from scaleinv.eval.plan import Comparison, Job, training_settings
from scaleinv.settings import settings
from scaleinv.train.config import TrainConfig


def test_each_distinct_model_is_trained_once():
    plan = Comparison(out=Path("x"), seeds=2)
    jobs = plan.all_jobs()
    models = {job.model for job in jobs}
    assert len(jobs) == 2 * len(models)
    assert {job.model: job.methods for job in jobs}["rope"] == ("rope", "rope+ntk", "yarn", "yarn-no-factor")
    assert {name for job in jobs for name in job.methods} == set(plan.methods)
    assert [job.seed for job in jobs] == [0] * len(models) + [1] * len(models)


def test_a_sweep_reuses_the_default_lengthscale():
    plan = Comparison(out=Path("x"), methods=["scale-invariant-p-rope"], seeds=1, tau=(1.0, 10.0, 100.0))
    assert [job.name for job in plan.all_jobs()] == [
        "scale-invariant-p-rope-seed0",
        "scale-invariant-p-rope-tau1-seed0",
        "scale-invariant-p-rope-tau100-seed0",
    ]
    assert plan.config(plan.all_jobs()[1]).model.tau == 1.0
    assert Job("rope", 3, ("rope",)).name == "rope-seed3"


def test_any_setting_of_a_run_reaches_every_model():
    given = {
        "steps": 7,
        "lr_matrices": 0.5,
        "schedule": "cosine",
        "order": "sequential",
        "layers": 3,
        "rope_base": 500.0,
    }
    plan = Comparison(out=Path("x"), methods=["rope", "alibi"], train=given)
    for job in plan.all_jobs():
        config = plan.config(job)
        values = {**dataclasses.asdict(config), **dataclasses.asdict(config.model)}
        assert {name: values[name] for name in given} == given
        assert (config.model.method, config.seed, config.out) == (job.model, job.seed, f"x/runs/{job.name}")
        assert (config.data, config.keep) == ("sotu", 1)


def test_every_setting_is_checked_or_known_not_to_matter():
    """A new field of TrainConfig is compared with the folder's runs unless somebody says that it need not be."""
    compared = training_settings(TrainConfig())
    not_compared = {
        name for name in settings(TrainConfig) if name not in compared and not name.startswith(("lr_", "val_"))
    }
    data = {"data", "tokenizer"}  # by their hash
    free = {"device", "parallel", "compile", "micro_tokens", "keep", "checkpoint_every", "log_every", "wandb"}
    assert not_compared == {"seed", "out"} | data | free
    assert compared["learning_rates"] == {"matrices": 0.02, "embedding": 0.1, "output": 0.005}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["ropes"]}, "unknown method 'ropes'"),
        ({"methods": []}, "methods must name at least one"),
        ({"seeds": 0}, "seeds must be positive"),
        ({"tau": [0.0]}, "tau must be positive"),
        ({"jobs": 0}, "jobs must be positive"),
        ({"tokens": -3}, "tokens must be positive"),
        ({"lengths": "1x,foo"}, "lengths must read like"),
        ({"train": {"clip": -1.0}}, "clip must be positive"),
        ({"train": {"seed": 3}}, "seed is chosen for each model"),
        ({"train": {"stepps": 3}}, "stepps"),
    ],
)
def test_errors_name_the_option(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Comparison(out=Path("x"), **changes)
