"""The README and the docs are true: their Python runs, their commands parse, their links lead somewhere.

A block that cannot run here is preceded by ``<!-- not run: the reason -->``; it must still be Python.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scaleinv.cli import main
from scaleinv.cli.program import parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[tuple[bool, str]]:
    """The fenced blocks of a language, each with whether it can run here."""
    fence = re.compile(r"^(<!-- not run: .+? -->\n)?```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    return [(not note, text) for note, kind, text in fence.findall(page.read_text()) if kind == language]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `scaleinv` command that a page shows."""
    for _, text in blocks(page, ""):
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            found = re.match(r"\s*(?:torchrun .*?-m )?scaleinv (.*)", line)
            if found:
                yield shlex.split(found[1].replace("…", ""), comments=True)


@pytest.fixture
def hub(monkeypatch):
    """A small Llama in the place of every model on the hub."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    original = AutoModelForCausalLM.from_pretrained

    def from_pretrained(name, *rest, **options):
        if Path(str(name)).exists():
            return original(name, *rest, **options)
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=512, **sizes))

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return from_pretrained


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_runs(page, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(64, (8192,), generator=torch.Generator().manual_seed(0))
    query, key, value = torch.randn(3, 1, 2, 64, 32, generator=torch.Generator().manual_seed(1))
    names = {"model": hub("any").eval(), "tokens": tokens, "torch": torch, "query": query, "key": key, "value": value}
    exec("import scaleinv, scaleinv.hf", names)
    for runs, text in blocks(page, "python"):
        code = compile(text, str(page), "exec")
        if runs:
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse(page):
    for arguments in commands(page):
        if arguments[0] in ("COMMAND", "--help", "--version"):
            continue
        parser().parse_args(arguments)


def test_every_command_shown_has_help(capsys):
    shown = {arguments[0] for page in PAGES for arguments in commands(page)} - {"COMMAND", "--help", "--version"}
    assert {"train", "compare", "evaluate", "needle", "generate"} <= shown
    for name in sorted(shown):
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"scaleinv {name}" in capsys.readouterr().out


@pytest.mark.parametrize("page", [*PAGES, ROOT / "results/README.md"], ids=[*NAMES, "results/README.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "results/README.md"], ids=[*NAMES, "results/README.md"])
def test_lines_are_short(page):
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        assert len(line) <= 120 or line.startswith("|") or "](" in line, f"{page.name}:{number}"
