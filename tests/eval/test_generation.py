import pytest
import torch

from scaleinv.eval import generate
from scaleinv.eval.generation import _choose
from scaleinv.model import GPT, GPTConfig

PROMPT = torch.tensor([1, 2, 3])


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, vocab_size=50, train_length=16, method="rope+ntk"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def test_greedy_is_the_argmax_of_full_forwards(model):
    text = PROMPT.tolist()
    for _ in range(30):
        text.append(int(model(torch.tensor([text]), context_length=33)[0, -1].argmax()))
    assert list(generate(model, PROMPT, 30, temperature=0)) == text[3:]


def test_seed_gives_the_same_text_again(model):
    texts = [list(generate(model, PROMPT, 20, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_one_and_tiny_top_p_are_greedy(model):
    greedy = list(generate(model, PROMPT, 10, temperature=0))
    assert list(generate(model, PROMPT, 10, top_k=1, seed=0)) == greedy
    assert list(generate(model, PROMPT, 10, top_p=1e-9, seed=0)) == greedy


def test_top_k_and_top_p_bound_the_choice(model):
    logits = model(PROMPT[None])[0, -1]
    best = set(logits.topk(3).indices.tolist())
    assert {next(generate(model, PROMPT, 1, top_k=3, seed=seed)) for seed in range(60)} == best
    ordered, order = logits.softmax(-1).sort(descending=True)
    inside = set(order[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert {next(generate(model, PROMPT, 1, top_p=0.5, seed=seed)) for seed in range(60)} <= inside


def test_stop_and_vocabulary(model):
    greedy = list(generate(model, PROMPT, 10, temperature=0))
    assert list(generate(model, PROMPT, 10, temperature=0, stop=greedy[4])) == greedy[: greedy.index(greedy[4])]
    assert max(generate(model, PROMPT, 50, seed=0, vocabulary=5)) < 5


def test_tokens_come_one_at_a_time(model):
    stream = generate(model, PROMPT, 10**9, temperature=0)
    assert [next(stream) for _ in range(3)] == list(generate(model, PROMPT, 3, temperature=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must not be negative"),
        ({"top_k": 0}, "top_k must be positive"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"tokens": -1}, "tokens must not be negative"),
        ({"prompt": torch.tensor([], dtype=torch.long)}, "prompt must be a non-empty"),
    ],
)
def test_errors_name_the_argument(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(**{"model": model, "prompt": PROMPT, "tokens": 3, **options})


def test_a_temperature_near_zero_takes_the_likeliest():
    logits = torch.tensor([1.0, 3.0, 2.0])
    for temperature in (1e-3, 1e-30, 1e-320):
        assert _choose(logits, temperature, None, None, torch.Generator()) == 1
