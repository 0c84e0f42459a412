"""``oled-jax generate`` on a fake engine: flags to arguments, and what is printed."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import oled_jax
from experiments.byte_tokenizer import special_tokens

from .conftest import ANSWER, metrics_of

GOLDEN = Path(__file__).parents[1] / "golden"
TINY, TINY22 = GOLDEN / "llada2-tiny-f32", GOLDEN / "llada22-tiny-f32"
SPECIAL = special_tokens(320).by_text
MASK = SPECIAL["<|mask|>"]


def test_flags_reach_the_rule_and_the_engine(generate, engine, model):
    flags = {
        "--block-length": 16,
        "--steps": 4,
        "--threshold": 0.5,
        "--minimal-topk": 2,
        "--temperature": 0.7,
        "--top-k": 5,
        "--top-p": 0.9,
        "--mask-id": 300,
        "--eos-id": "301,302",
        "--gen-length": 64,
        "--context-length": 256,
        "--seed": 7,
        "--dtype": "bfloat16",
        "--expert-bias-dtype": "bfloat16",
    }
    listed = [str(part) for flag in flags.items() for part in flag]
    assert generate(model, "--prompt-ids", "1, 2,3", "--eos-early-stop", "--allow-special-ids", *listed) == 0
    prompt, rule, arguments = engine.calls[0]
    assert prompt == [1, 2, 3]
    assert rule == oled_jax.Threshold(16, 4, 0.5, 2, True, 0.7, 5, 0.9, 300, (301, 302))
    assert arguments == {"gen_length": 64, "seed": 7, "allow_special_ids": True}
    path, load = engine.loads[0]
    assert path == str(model)
    assert (load["dtype"], load["context_length"], load["expert_bias_dtype"]) == ("bfloat16", 256, "bfloat16")


def test_defaults_are_the_rules_own_with_ids_of_the_checkpoint(generate, engine, model):
    assert generate(model, "--prompt-ids", "1,2,3") == 0
    _, rule, arguments = engine.calls[0]
    assert rule == oled_jax.Threshold(mask_id=MASK, eos_id=(SPECIAL["<|endoftext|>"],))
    assert arguments == {"gen_length": 509, "seed": 0, "allow_special_ids": False}
    assert engine.loads[0][1] | {"progress": None, "on_compile": None, "on_plan": None} == {
        "dtype": None,
        "context_length": 512,
        "expert_bias_dtype": "checkpoint",
        "progress": None,
        "on_compile": None,
        "on_plan": None,
    }


PLACED = {"experts_on_device": "40%", "policy": "oled", "form": "stream", "staging": 3, "manager": "host"}


def test_options_for_experts(generate, engine, model):
    flags = [text for name, value in PLACED.items() for text in (f"--{name.replace('_', '-')}", value)]
    assert generate(model, "--prompt-ids", "1,2,3", *flags) == 0
    assert PLACED.items() <= engine.loads[0][1].items()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), ""),
        (("--policy", "oled"), "--policy has no effect"),
        (("--staging", 3, "--form", "stream", "--manager", "host"), "--form, --staging, --manager have no effect"),
        (("--policy", "oled", "--experts-on-device", "all"), "--policy has no effect"),
    ],
)
def test_options_that_need_a_budget_and_have_none_are_noted(generate, engine, model, capsys, flags, told):
    assert generate(model, "--prompt-ids", "1,2,3", *flags) == 0
    capsys.readouterr()
    engine.loads[0][1]["on_plan"](SimpleNamespace(experts_on_device=None))
    noted = f"note: {told}: all experts stay on the device (see --experts-on-device)\n" if told else ""
    assert capsys.readouterr().err == noted


@pytest.mark.parametrize(
    ("folder", "flags", "expected"),
    [
        (TINY22, (), oled_jax.Levenshtein(delete_token_id=310, split_token_id=311)),
        (TINY22, ("--decoding", "threshold"), oled_jax.Threshold()),
        (TINY, ("--decoding", "editing", "--editing-threshold", "off"), oled_jax.Editing(editing_threshold=None)),
        (TINY, ("--decoding", "editing", "--num-to-transfer", 2), oled_jax.Editing(num_to_transfer=2)),
        (
            TINY22,
            ("--max-steps-per-block", 9, "--max-post-steps", 2, "--delete-token-id", 1, "--split-token-id", 2),
            oled_jax.Levenshtein(max_steps_per_block=9, max_post_steps=2, delete_token_id=1, split_token_id=2),
        ),
    ],
)
def test_choice_of_the_rule(generate, engine, folder, flags, expected):
    assert generate(folder, "--prompt-ids", "5", "--mask-id", 319, *flags) == 0
    assert engine.calls[0][1] == dataclasses.replace(expected, mask_id=319, eos_id=(316,))


def test_text_goes_through_the_chat_template_unless_raw(generate, engine, model):
    assert generate(model, "--prompt", "hi", "--system", "Be brief.") == 0
    assert generate(model, "--prompt", "hi", "--raw") == 0
    chat, raw = (call[0] for call in engine.calls)
    assert raw == list(b"hi")
    assert chat.count(SPECIAL["<role>"]) == 3 and bytes(b for b in chat if b < 256).startswith(b"SYSTEMBe brief.\n")


# Output.


def test_json_is_one_object_per_prompt_and_nothing_else(generate, engine, model, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "hé", "id": "a"}, {"prompt_ids": [4, 5], "seed": 3, "id": 17}, {"prompt_ids": [6]}]
    prompts.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert generate(model, "--prompts-file", prompts, "--raw", "--seed", 9, "--json", "--gen-length", 40) == 0
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [(result["index"], result["id"]) for result in results] == [(0, "a"), (1, 17), (2, None)]
    assert [call[0] for call in engine.calls] == [list("hé".encode()), [4, 5], [6]]
    assert [call[2]["seed"] for call in engine.calls] == [9, 3, 9]
    assert engine.loads[0][1]["context_length"] == 64 and len(engine.loads) == 1
    assert results[1] == {
        "index": 1,
        "id": 17,
        "output_ids": list(ANSWER.encode()),
        "text": ANSWER,
        "num_forwards": 3,
        "num_commits": 1,
        "finished": True,
        "metrics": json.loads(json.dumps(metrics_of(2).to_json())),
    }


def test_text_is_null_and_ids_are_shown_without_a_tokenizer(generate, engine, capsys):
    assert generate(TINY, "--prompt-ids", "1", "--mask-id", 319, "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] is None
    assert generate(TINY, "--prompt-ids", "1", "--mask-id", 319) == 0
    assert capsys.readouterr().out == " ".join(str(byte) for byte in ANSWER.encode()) + "\n"


def test_without_a_terminal_only_the_answer_is_printed(generate, engine, model, capsys):
    assert generate(model, "--prompt-ids", "1") == 0
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n"
    assert err == "9 tokens, 3 forwards, 3 tokens/forward, 500 ms/forward, 4.5 tokens/s, finished\n"


def test_several_prompts_are_named_in_answers_and_summaries(generate, engine, model, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2]}')
    assert generate(model, "--prompts-file", prompts) == 0
    out, err = capsys.readouterr()
    assert out == f"==> {prompts} line 1 <==\n{ANSWER}\n\n==> {prompts} line 2 <==\n{ANSWER}\n"
    assert [line.split(": ")[0] for line in err.splitlines()] == [f"{prompts} line 1", f"{prompts} line 2"]


def test_terminal_shows_the_block_as_it_fills(generate, engine, model, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert generate(model, "--prompt-ids", "65,66,67,68,69", "--block-length", 8, "--gen-length", 10) == 0
    frames = capsys.readouterr().out.split("\r\x1b[J")
    # The prompt's part of its block is not shown, nor is what lies beyond gen_length.
    assert frames == ["░░░", "for", "for", "for░░░░░░░", "forty-two", "forty-two", "forty-two\n"]


def test_json_on_a_terminal_is_not_drawn(generate, engine, model, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert generate(model, "--prompt-ids", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == ANSWER


def test_terminal_tells_what_is_compiled_until_text_comes(generate, engine, model, capsys, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    for shown in ([], ["--json"]):
        assert generate(model, "--prompt-ids", "1", *shown) == 0
        compiling, rest = capsys.readouterr().err.split(" ...\x1b[K")
        assert compiling == "\rcompiling program 1 (denoise)"
        assert rest.startswith("\r\x1b[K") and "\x1b" not in rest[4:]


def test_line_about_compiling_is_removed_when_decoding_fails(generate, engine, model, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        engine.on_compile("denoise")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "generate", interrupted)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert generate(model, "--prompt-ids", "1") == 130
    assert capsys.readouterr().err == ("\rcompiling program 1 (denoise) ...\x1b[K\r\x1b[K\noled-jax: interrupted\n")
