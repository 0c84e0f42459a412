"""A user's mistakes: exit code 2, one line, nothing on standard output, and no weights loaded."""

import errno
import json
import os

import pytest

from experiments.byte_tokenizer import special_tokens
from oled_jax.cli import main
from tests.cli.conftest import TINY

MASK = special_tokens(320).by_text["<|mask|>"]
IDS = ("--prompt-ids", "1,2,3", "--mask-id", "319")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "one of the arguments --prompt --prompt-ids --prompts-file is required"),
        (("--prompt", "a", "--prompt-ids", "1"), "not allowed with argument"),
        (("--prompt-ids", ""), "--prompt-ids is empty"),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt-ids", "1,two"), "--prompt-ids '1,two'"),
        (("--prompt-ids", "1,,2"), "separated by commas"),
        (
            ("--prompt-ids", "1,320,-5", "--mask-id", "319"),
            "the prompt holds 320, -5, outside the vocabulary of 320 tokens",
        ),
        (("--prompt-ids=-1", "--mask-id", "319"), "holds -1, outside the vocabulary"),
        (("--prompt-ids", "1,319", "--mask-id", "319"), "holds 319, which decoding takes as a mask or an edit"),
        (("--prompt", "hello", "--mask-id", "319"), "holds no tokenizer.json"),
        (("--prompt", "hello", "--mask-id", "319", "--raw", "--system", "x"), "--system has no place in --raw text"),
        (("--prompt-ids", "1"), "mask id is unknown for a vocabulary of 320 tokens: pass --mask-id"),
        (("--prompt-ids", "1", "--mask-id", "320"), "mask_id 320 is outside the vocabulary of 320 tokens"),
        (("--prompt-ids", "1", "--mask-id", "-1"), "mask_id is -1"),
        ((*IDS, "--eos-id", "5,400"), "eos_id 400 is outside the vocabulary"),
        ((*IDS, "--eos-id", "5,"), "not an id or several"),
        ((*IDS, "--block-length", "0"), "block_length is 0"),
        ((*IDS, "--block-length", "513"), "block_length is 513, larger than the context of 512"),
        ((*IDS, "--block-length", "33", "--context-length", "32"), "block_length is 33, larger than the context of 32"),
        ((*IDS, "--steps", "0"), "steps is 0"),
        ((*IDS, "--steps", "many"), "argument --steps: invalid int value: 'many'"),
        ((*IDS, "--threshold", "1.01"), "threshold is 1.01"),
        ((*IDS, "--threshold", "-0.5"), "threshold is -0.5"),
        ((*IDS, "--threshold", "nan"), "threshold is nan"),
        ((*IDS, "--decoding", "editing", "--editing-threshold", "2"), "editing_threshold is 2.0"),
        ((*IDS, "--decoding", "editing", "--editing-threshold", "on"), "'on' is neither a number nor off"),
        ((*IDS, "--top-k", "0"), "top_k is 0"),
        ((*IDS, "--top-p", "0"), "top_p is 0.0"),
        ((*IDS, "--top-p", "1.5"), "top_p is 1.5"),
        ((*IDS, "--temperature", "-1"), "temperature is -1.0"),
        ((*IDS, "--temperature", "inf"), "temperature is inf"),
        ((*IDS, "--minimal-topk", "0"), "minimal_topk is 0"),
        ((*IDS, "--gen-length", "0"), "--gen-length is 0"),
        (
            (*IDS, "--gen-length", "510"),
            "the prompt has 3 tokens, and with --gen-length 510 exceeds the context of 512",
        ),
        ((*IDS, "--context-length", "513"), "--context-length is 513: give 1 to 512"),
        ((*IDS, "--context-length", "0"), "--context-length is 0"),
        (
            ("--prompt-ids", ",".join(["1"] * 40), "--mask-id", "319", "--context-length", "40"),
            "the prompt has 40 tokens and leaves no room in the context of 40; --context-length may go up to 512",
        ),
        (
            ("--prompt-ids", ",".join(["1"] * 600), "--mask-id", "319"),
            "the prompt has 600 tokens and leaves no room in the context of 512; that is the model's limit",
        ),
        ((*IDS, "--seed", "-1"), "--seed is -1"),
        ((*IDS, "--dtype", "float16"), "argument --dtype: invalid choice: 'float16'"),
        ((*IDS, "--decoding", "beam"), "argument --decoding: invalid choice: 'beam'"),
        ((*IDS, "--step", "3"), "unrecognized arguments: --step 3"),
        (
            (*IDS, "--decoding", "threshold", "--editing-threshold", "0.5", "--num-to-transfer", "2"),
            "--decoding threshold does not take --editing-threshold (it belongs to editing and levenshtein), "
            "--num-to-transfer (it belongs to editing)",
        ),
        ((*IDS, "--delete-token-id", "3"), "does not take --delete-token-id (it belongs to levenshtein)"),
    ],
)
def test_mistakes(mistake, engine, arguments, expected):
    assert expected in mistake(*arguments)
    assert not engine.loads


def test_edit_ids_are_unknown_to_a_model_that_has_none(mistake, engine):
    assert "pass --delete-token-id" in mistake(*IDS, "--decoding", "levenshtein")


def test_prompt_that_spells_the_mask_is_refused_unless_allowed(generate, mistake, engine, model):
    spelled = ("--prompt", "what is <|mask|>?", "--raw")
    assert f"the prompt holds {MASK}, which decoding takes as a mask" in mistake(*spelled, model=model)
    assert generate(model, *spelled, "--allow-special-ids") == 0


def test_text_without_tokens_is_an_empty_prompt(mistake, engine, model):
    (model / "chat_template.jinja").write_text("{# says nothing #}")
    assert "the prompt has no tokens" in mistake("--prompt", "hello", model=model)


def test_folder_without_config(mistake, engine, tmp_path):
    assert f"--model {tmp_path / 'absent'} is not a folder" in mistake(*IDS, model=tmp_path / "absent")
    assert "--model '' is not a folder" in mistake(*IDS, model="")
    assert "config.json does not exist" in mistake(*IDS, model=tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", *IDS),
        ("check", "--experts-on-device", "1", "--mask-id", "319"),
        ("trace", *IDS, "--out", "a.safetensors"),
        ("plan",),
    ],
    ids=lambda command: command[0],
)
def test_a_model_without_mixture_of_experts(command, model, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"first_k_dense_replace": config["num_hidden_layers"]}))
    assert main([command[0], "--model", str(model), *command[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "which leaves no mixture-of-experts layer; this package runs models that have one" in err


@pytest.mark.parametrize("arguments", [["--verbose"], ["generat"], ["generate"]])
def test_incomplete_commands(capsys, arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("oled-jax: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "is not JSON: "),
        (b"\xff", "is not UTF-8 text"),
        (b"[" * 100_000, "cannot be read as JSON: maximum recursion depth exceeded"),
        (b'{"prompt_ids": [' + b"1" * 10_000 + b"]}", "cannot be read as JSON: Exceeds the limit"),
        (b"[1, 2]", "is not a JSON object"),
        (b"{}", "needs exactly one of prompt and prompt_ids"),
        (b'{"prompt": "a", "prompt_ids": [1]}', "needs exactly one of prompt and prompt_ids"),
        (b'{"prompt": ""}', "prompt is ''"),
        (b'{"prompt": 3}', "prompt is 3"),
        (b'{"prompt": null}', "prompt is None"),
        (b'{"prompt_ids": []}', "prompt_ids is no list of integers"),
        (b'{"prompt_ids": "1,2"}', "prompt_ids is no list of integers"),
        (b'{"prompt_ids": [1, true]}', "prompt_ids is no list of integers"),
        (b'{"prompt_ids": [1.0]}', "prompt_ids is no list of integers"),
        (b'{"prompt_ids": [1], "gen_length": 3}', "has unknown keys gen_length (known: prompt, prompt_ids, id, seed, "),
        (b'{"prompt_ids": [1], "task": ""}', "task is '', expected text"),
        (b'{"prompt_ids": [1], "task": 3}', "task is 3, expected text"),
        (b'{"prompt_ids": [1], "split": "test"}', "split is 'test', expected calibration or evaluation"),
        (b'{"prompt_ids": [1], "seed": "x"}', "seed is 'x'"),
        (b'{"prompt_ids": [1], "seed": 4294967296}', "seed is 4294967296"),
        (b'{"prompt_ids": [1], "id": [2]}', "id is [2]"),
    ],
)
def test_broken_lines_are_numbered_and_told_together(mistake, engine, tmp_path, line, expected):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt_ids": [1]}\n\n' + line + b"\n{}\n")
    told = mistake("--prompts-file", prompts, "--mask-id", "319")
    assert f"{prompts}: 2 problems: line 3: {expected}" in told
    assert "; line 4: needs exactly one of prompt and prompt_ids" in told


def test_prompts_that_cannot_be_used_are_told_together(mistake, engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [400]}\n{"prompt_ids": [1]}\n{"prompt_ids": [319, 1, 319]}\n')
    told = mistake("--prompts-file", prompts, "--mask-id", "319")
    assert f"2 problems: {prompts} line 1 holds 400" in told and f"{prompts} line 3 holds 319, 319, which" in told


def test_prompts_file_that_is_empty_or_absent(mistake, engine, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    assert f"{empty} holds no prompts" in mistake("--prompts-file", empty)
    absent = tmp_path / "absent.jsonl"
    reason = os.strerror(errno.ENOENT)
    assert f"--prompts-file {absent} cannot be read: {reason}" in mistake("--prompts-file", absent)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "hello \\ud800"}', r"prompt is not valid Unicode at character 6 (counted from 0), '\ud800'"),
        (
            b'{"prompt": "\\ud83d\\ude00\\udc00"}',
            r"prompt is not valid Unicode at character 1 (counted from 0), '\udc0",
        ),
        (b'{"prompt_ids": [1], "id": "\\udfff"}', "id is not valid Unicode at character 0 "),
        (b'{"prompt": "\xed\xa0\x80"}', "is not UTF-8 text (byte 12)"),  # a surrogate without an escape
        (b'{"prompt": "a", "seed": 1, "prompt": "b"}', "has the key 'prompt' more than once"),
        (b'{"prompt_ids": [1], "prompt_ids": [1]}', "has the key 'prompt_ids' more than once"),
        (b'{"' + b"k" * 5000 + b'": 1, "' + b"k" * 5000 + b'": 1}', f"has the key '{'k' * 79}... more than once"),
        (b'{"prompt_ids": [1], "seed": ' + b"7" * 3000 + b"}", f"seed is {'7' * 80}...: give an integer"),
    ],
)
def test_lines_that_readers_could_take_in_several_ways(mistake, engine, tmp_path, line, expected):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt_ids": [1]}\n' + line + b"\n")
    assert f"{prompts}: 1 problem: line 2: {expected}" in mistake("--prompts-file", prompts, "--mask-id", "319")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n"])
def test_prompts_file_in_another_encoding(mistake, engine, tmp_path, encoding, start):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes((start + '{"prompt_ids": [1]}\n{"prompt_ids": [2]}\n').encode(encoding))
    told = mistake("--prompts-file", prompts, "--mask-id", "319")
    assert f"--prompts-file {prompts} is UTF-16 or UTF-32 text, not UTF-8: save it as UTF-8" in told


def test_prompts_file_may_begin_with_a_byte_order_mark(generate, engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes('{"prompt_ids": [7]}\n'.encode("utf-8-sig"))
    assert generate(TINY, "--prompts-file", prompts, "--mask-id", "319") == 0
    assert [ids for ids, _, _ in engine.calls] == [[7]]


def test_text_of_the_command_line_that_is_no_unicode(mistake, engine, model):
    at = r"is not valid Unicode at character 2 (counted from 0), '\udcff': give UTF-8"
    assert f"--prompt {at}" in mistake("--prompt", "hi\udcff", model=model)
    assert f"--prompt {at}" in mistake("--prompt", "hi\udcff", "--raw", model=model)
    assert f"--system {at}" in mistake("--prompt", "hi", "--system", "be\udcff", model=model)


@pytest.mark.parametrize("part", ["1_0", "+1", "\u0661", "1 0", "--1", "9" * 5000, "1,2," * 5000])
def test_prompt_ids_that_are_no_plain_numbers(mistake, engine, part):
    told = mistake("--prompt-ids", f"1,{part}", "--mask-id", "319")
    assert "--prompt-ids '1," in told and "give token ids separated by commas" in told and len(told) < 250


def test_ids_of_many_digits_are_cut_in_messages(mistake, engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": [10**3000]}))
    told = mistake("--prompts-file", prompts, "--mask-id", "319")
    assert f"holds 1{'0' * 79}..., outside the vocabulary" in told


def test_prompts_file_without_a_name(mistake, engine):
    assert "--prompts-file is empty: give the path of a file" in mistake("--prompts-file", "")
