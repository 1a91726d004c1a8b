"""Settings: what a field takes, from Python, a command line or a file."""

import dataclasses
import math
import re
from typing import Literal

import pytest

from scaleinv.model import GPTConfig
from scaleinv.settings import check, setting, settings
from scaleinv.train import TrainConfig, preset


@dataclasses.dataclass
class Example:
    count: int = setting(3, "how many", least=1)
    share: float = setting(0.5, "a share", least=0, below=1)
    bound: float | None = setting(None, "a bound", unset="none", above=0)
    pair: tuple[float, float] = setting((0.9, 0.95), "two numbers", least=0)
    many: tuple[int, ...] = setting((1, 4), "some numbers", least=1)
    shape: Literal["round", "square"] = setting("round", "a shape")
    name: str | None = setting(None, "a name")
    quick: bool = setting(False, "be quick")
    other: list = dataclasses.field(default_factory=list)


def test_only_settings_are_found_and_in_order():
    assert list(settings(Example)) == ["count", "share", "bound", "pair", "many", "shape", "name", "quick"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "12", 12),
        ("share", "0.25", 0.25),
        ("bound", "1e-3", 0.001),
        ("pair", "0.8,0.9", (0.8, 0.9)),
        ("many", "2", (2,)),
        ("many", "1,2,3", (1, 2, 3)),
        ("shape", "square", "square"),
        ("name", "x y", "x y"),
    ],
)
def test_text_becomes_a_value(name, text, value):
    assert settings(Example)[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be a positive integer, got 0"),
        ("count", 2.0, "count must be a positive integer, got 2.0"),
        ("count", True, "count must be a positive integer, got True"),
        ("count", 2**63, "count must be a positive integer"),
        ("count", None, "count must be a positive integer, got None"),
        ("share", 1, "share must be a number from 0 to 1, 1 excluded, got 1"),
        ("share", math.nan, "share must be a number from 0 to 1"),
        ("bound", math.inf, "bound must be positive and finite, got inf"),
        ("bound", "3", "bound must be positive and finite, got '3'"),
        ("pair", (0.9,), "pair must be 2 numbers of at least 0"),
        ("many", (), "many must be one or more integers of at least 1"),
        ("many", (1, 0.5), "many must be one or more integers"),
        ("shape", "oval", "shape must be 'round' or 'square', got 'oval'"),
        ("name", " ", "name must be text that is not empty"),
        ("quick", 1, "quick must be true or false, got 1"),
    ],
)
def test_a_bad_value_names_the_setting_and_what_it_takes(name, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Example(**{name: value}))


@pytest.mark.parametrize("text", ["", "x", "1e999", "nan", "9" * 5000, "-1", "0.5.5"])
def test_text_that_is_no_good_number(text):
    with pytest.raises(ValueError, match=r"^must be a number from 0 to 1, 1 excluded, got"):
        settings(Example)["share"].parse(text)


def test_every_field_of_a_run_is_a_setting_with_help():
    for config in (TrainConfig, GPTConfig):
        fields = {field.name for field in dataclasses.fields(config)} - {"model"}
        assert set(settings(config)) == fields
        for one in settings(config).values():
            assert one.help
            assert one.unset or one.default is not None, one.name
    assert not settings(TrainConfig).keys() & settings(GPTConfig).keys(), "a flat file could not tell them apart"


def test_a_preset_takes_settings_of_the_run_and_of_the_model():
    config = preset("162m", method="alibi", steps=7, layers=2, width=64, heads=2, train_length=128)
    assert (config.steps, config.model.layers, config.model.method) == (7, 2, "alibi")
    assert config.lr_embedding == 0.3
    with pytest.raises(TypeError, match="speed"):
        preset("mini", speed=3)
