"""``oled-jax check`` and the options for experts, on a real checkpoint."""

import json

import pytest

from oled_jax import comparison
from oled_jax.cli import main
from tests.golden_fixtures import GOLDEN

TINY = str(GOLDEN / "llada2-tiny-f32")
SETTINGS = ("--mask-id", "319", "--block-length", "8", "--steps", "8", "--gen-length", "16", "--context-length", "64")


def check(*arguments: str) -> int:
    return main(["check", "--model", TINY, "--experts-on-device", "25%", *SETTINGS, *arguments])


def test_prompts_are_made_up_and_compared(capsys):
    assert check("--policy", "oled:rho_in=0.5", "--form", "stream", "--json") == 0
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["metrics"]["prompt_tokens"] for result in results] == [5, 24, 48]
    for result in results:
        assert result["problems"] == []
        assert result["steps_compared"] == result["steps"] > 0
        experts = result["metrics"]["experts"]
        assert (experts["experts_on_device"], experts["form"]) == (4, "stream")
        assert experts["policy"] == "oled:mode=select,rho_in=0.5"
    assert err.count("plan: 4 of 16 experts per layer (25%)") == 1


def test_what_differs_is_told_and_sets_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(comparison, "FLOAT32_MAX", -1.0)
    assert check("--prompt-ids", "1,2,3") == 1
    out, err = capsys.readouterr()
    assert "the prompt (3 tokens): logits differ by up to" in out
    assert "tokens: 16, all equal" in out
    assert "4 of 16 experts on the device" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gen-length", "64"), "leaves no room"),
        (("--experts-on-device", "0"), "from 1 to 16"),
        (("--policy", "mru"), "the policies are"),
        (("--experts-on-device", "auto"), 'give a number of experts or a share such as "40%"'),
        (("--raw", "--system", "x"), "--system"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    assert check(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_budget_is_required(capsys):
    assert main(["check", "--model", TINY]) == 2
    assert "--experts-on-device" in capsys.readouterr().err


def test_generate_under_a_budget_says_what_it_cost(capsys):
    arguments = ["generate", "--model", TINY, "--prompt-ids", "1,2,3", *SETTINGS]
    assert main([*arguments, "--json"]) == 0
    resident = json.loads(capsys.readouterr().out)
    assert resident["metrics"]["experts"]["policy"] is None
    assert main([*arguments, "--experts-on-device", "4", "--policy", "lfuda", "--manager", "host"]) == 0
    out, err = capsys.readouterr()
    assert [int(token) for token in out.split()] == resident["output_ids"]
    assert "4 of 16 experts on the device" in err and "hit rate" in err
