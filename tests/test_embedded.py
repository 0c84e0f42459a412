"""The checkpoint that ships: it is found by its name everywhere, small enough, and knows what it was trained for."""

import json
from pathlib import Path

import numpy as np
import pytest
from tasks import KINDS, grade, held_out

from oled_jax import Engine, ModelConfig, Threshold
from oled_jax.assets import model_folder
from oled_jax.cli import main as oled_jax
from oled_jax.convert.cli import main as oled_convert
from oled_jax.tokenizer import decode, encode_chat

LIMIT = 16 * 10**6  # bytes, all files together


def test_it_is_small_and_whole():
    folder = Path(model_folder("demo"))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }
    config = ModelConfig.from_hf(folder)
    assert config.num_experts >= 64 and config.num_experts_per_tok >= 4
    assert config.n_group > 1 and config.num_shared_experts == 1 and config.first_k_dense_replace == 1


def test_only_the_bare_name_means_it():
    assert model_folder("./demo") == "./demo"
    assert model_folder(Path("demo")) == Path("demo")
    assert model_folder(None) is None


def test_commands_take_the_name(capsys):
    assert oled_jax(["plan", "--model", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_experts"] == 64
    assert oled_convert(["inspect", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] > 0


@pytest.mark.slow
def test_answers_under_a_budget_are_right_and_equal():
    """A held-out example of each task: most are right, as the model card says of many more."""
    examples = [example for task in KINDS for example in held_out(task, 1, 1, 1.0)]
    rule, answers = Threshold(block_length=32, threshold=0.9), []
    for placement in (None, "40%"):
        engine = Engine.load("demo", dtype="float32", experts_on_device=placement, context_length=512)
        prompts = [encode_chat(engine.tokenizer, example.prompt) for example in examples]
        answers.append(engine.generate_batch(prompts, rule, gen_length=128))
    resident, budget = answers
    assert [a.tokens for a in resident] == [a.tokens for a in budget]
    right = [grade(example, decode(engine.tokenizer, a.tokens)) for example, a in zip(examples, budget, strict=True)]
    assert np.mean(right) >= 0.75
    assert sum(len(a.tokens) for a in budget) >= 4 * sum(a.num_forwards for a in budget)
