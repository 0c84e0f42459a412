"""A fake engine that answers with a fixed text, a folder that looks like a checkpoint, and how to run the command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.byte_tokenizer import special_tokens, tokenizer_files
from oled_jax.cli import main
from oled_jax.metrics import ExpertMetrics, ExpertTraffic, GenerationMetrics

TINY = Path(__file__).parents[1] / "golden" / "llada2-tiny-f32"
VOCAB = 320
SPECIAL = special_tokens(VOCAB).by_text
ANSWER = "forty-two"


def metrics_of(prompt_tokens):
    """What the fake engine says that an answer to ``prompt_tokens`` tokens cost."""
    traffic = ExpertTraffic(1, (3,), (3,), (8,), (8,), (0,), (1,))
    experts = ExpertMetrics(4, 4, None, None, 1000, traffic, traffic, ((0, 1, 2, 3),), 0.0)
    return GenerationMetrics(prompt_tokens, len(ANSWER), 3, 1, 2, 0, 1, 0.5, 2.0, 0.1, experts)


class FakeEngine:
    """Answers ``ANSWER`` in two blocks, the first of which it denoises in two steps; remembers what it was asked.

    Says that it compiles a program before every answer.
    """

    def __init__(self):
        self.loads, self.calls = [], []

    def load(self, path, **kwargs):
        self.loads.append((path, kwargs))
        kwargs["progress"](5, 10)
        self.on_compile = kwargs["on_compile"]
        return self

    def generate(self, prompt_ids, rule, *, on_step, on_block, **kwargs):
        self.calls.append((list(prompt_ids), rule, kwargs))
        self.on_compile("denoise")
        answer = list(ANSWER.encode())
        tokens = [*prompt_ids, *answer]
        tokens += [SPECIAL["<|endoftext|>"]] * (-len(tokens) % rule.block_length)
        if on_step:
            for block in range(len(prompt_ids) // rule.block_length, len(tokens) // rule.block_length):
                start = block * rule.block_length
                final = np.array(tokens[start : start + rule.block_length], np.int32)
                fixed = np.arange(start, start + rule.block_length) < len(prompt_ids)
                on_step(SimpleNamespace(block=block, tokens=np.where(fixed, final, rule.mask_id)))
                on_step(SimpleNamespace(block=block, tokens=final))
                on_block(SimpleNamespace(block=block, tokens=final))
        metrics = metrics_of(len(prompt_ids))
        return SimpleNamespace(tokens=answer, num_forwards=3, num_commits=1, finished=True, metrics=metrics)


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setitem(sys.modules, "oled_jax.engine", SimpleNamespace(Engine=engine))
    return engine


@pytest.fixture
def model(tmp_path):
    """A checkpoint folder as far as the command line reads it: a config and a tokenizer, no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": SPECIAL["<|endoftext|>"]}))
    for name, text in tokenizer_files(VOCAB, 512).items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def generate():
    """Runs ``oled-jax generate`` in this process; returns its exit code."""

    def run(model, *arguments):
        return main(["generate", "--model", str(model), *map(str, arguments)])

    return run


@pytest.fixture
def mistake(generate, capsys):
    """Runs a command that must fail as a user's mistake does; returns what it says."""

    def run(*arguments, model=TINY):
        code = generate(model, *arguments)
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("oled-jax: error: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err

    return run
