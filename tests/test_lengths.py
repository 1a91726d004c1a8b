import pytest

from scaleinv import lengths


def test_multiples_and_tokens_in_the_order_given():
    assert lengths.parse("1x, 4X,1000,0.5x", 512) == {"1x": 512, "4x": 2048, "1000": 1000, "0.5x": 256}
    assert lengths.parse(["64x", 100], 512) == {"64x": 32_768, "100": 100}


@pytest.mark.parametrize("bad", ["", "x", "0x", "-1", "1.5", "1x,", "0", "nan", "1e3"])
def test_what_does_not_read_like_a_length_is_named(bad):
    with pytest.raises(ValueError, match=r"lengths must read like 4x .* got '"):
        lengths.parse(bad, 512)


def test_less_than_a_token_is_refused():
    with pytest.raises(ValueError, match=r"at least one token, got '0.1x'"):
        lengths.parse("0.1x", 4)


def test_multiples_need_a_training_length():
    with pytest.raises(ValueError, match="'4x' is a multiple of the training length, which is unknown"):
        lengths.parse("4x", None)
    assert lengths.parse("400", None) == {"400": 400}
    with pytest.raises(ValueError, match="'2048' is in tokens"):
        lengths.multiple("2048", None)


def test_order_and_labels():
    assert lengths.ordered(["16x", "1000", "1x", "0.5x", "1x"], 512) == ["0.5x", "1x", "1000", "16x"]
    assert [lengths.label(key, 512) for key in ("0.5x", "4x", "2048")] == ["0.5× (256)", "4× (2k)", "2k tokens"]


def test_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one length"):
        lengths.parse([], 512)
