"""Loading a tokenizer without remote code, encoding a conversation, decoding whatever comes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.byte_tokenizer import special_tokens, tokenizer_files
from oled_jax.errors import OledError
from oled_jax.tokenizer import decode, encode_chat, encode_raw, has_tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
VOCAB = 320
SPECIAL = special_tokens(VOCAB).by_text


def write_tokenizer(folder: Path, *, template: str | None = None, **config) -> Path:
    """A tokenizer of one token a byte in ``folder``; ``config`` is added to its tokenizer_config.json."""
    files = tokenizer_files(VOCAB, 512)
    (folder / "tokenizer.json").write_text(files["tokenizer.json"])
    settings = {**json.loads(files["tokenizer_config.json"]), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def plain(tmp_path):
    return load_tokenizer(write_tokenizer(tmp_path))


def test_folder_without_a_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    with pytest.raises(OledError, match="--prompt-ids takes token ids without one"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_file_is_one_clear_error(tmp_path, broken):
    write_tokenizer(tmp_path)
    (tmp_path / broken).write_text('{"version": ')
    with pytest.raises(OledError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_files_that_are_no_regular_ones_are_named_and_not_waited_for(tmp_path, name):
    write_tokenizer(tmp_path, template="{{ messages }}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert has_tokenizer(tmp_path)
    with pytest.raises(OledError, match=f"cannot be read: 1 problem: {name} is not a regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("length", ["512", [], True, {"a": 1}])
def test_a_length_that_is_no_number_is_one_clear_error(tmp_path, length):
    write_tokenizer(tmp_path, model_max_length=length)
    with pytest.raises(OledError, match=r"cannot be read: model_max_length is .*, expected a number"):
        load_tokenizer(tmp_path)


def test_a_length_may_be_absent(tmp_path):
    assert encode_raw(load_tokenizer(write_tokenizer(tmp_path, model_max_length=None)), "ab") == list(b"ab")


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LLaDA2Tokenizer", None])
def test_tokenizer_file_decides_whatever_class_is_named(tmp_path, tokenizer_class):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, tokenizer_class=tokenizer_class))
    text = "naïve 1234 <|mask|> ░\n\tend"
    before, after = text.split("<|mask|>")
    assert encode_raw(tokenizer, text) == [*before.encode(), SPECIAL["<|mask|>"], *after.encode()]
    assert decode(tokenizer, encode_raw(tokenizer, text)) == before + after


def test_remote_code_is_neither_run_nor_asked_for(tmp_path):
    """In a process of its own, with standard input closed: a question on the terminal would end it."""
    write_tokenizer(
        tmp_path,
        template="{{ messages[0].content }}|",
        tokenizer_class="LLaDA2Tokenizer",
        auto_map={"AutoTokenizer": ["tokenization_llada2.LLaDA2Tokenizer", None]},
    )
    remote = {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoTokenizer": "tokenization_llada2.LLaDA2Tokenizer",
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llada2_moe", "auto_map": remote}))
    for name in ("configuration_llada2_moe.py", "tokenization_llada2.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()\nraise SystemExit('ran')\n")
    code = (
        "from oled_jax.tokenizer import *\n"
        f"tokenizer = load_tokenizer({str(tmp_path)!r})\n"
        "print(encode_chat(tokenizer, 'ab'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "0"},
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, f"{list(b'ab|')}\n"), result.stderr
    assert result.stderr == ""  # not even the remark that PyTorch is missing
    assert not (tmp_path / "was_run").exists()


def test_chat_without_a_template_is_the_literal_form(plain):
    assert plain.chat_template is None
    expected = (
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>{braces} stay<|role_end|>"
        "<role>ASSISTANT</role>"
    )
    ids = encode_chat(plain, "{braces} stay")
    assert plain.decode(ids) == expected
    assert ids.count(SPECIAL["<role>"]) == 3 and ids[-1] == SPECIAL["</role>"]
    with_system = plain.decode(encode_chat(plain, "hi", system="Be brief."))
    assert with_system.startswith("<role>SYSTEM</role>Be brief.\ndetailed thinking off<|role_end|><role>HUMAN</role>hi")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_published_template_agrees_with_the_literal_form(tmp_path, system):
    template = tokenizer_files(VOCAB, 512)["chat_template.jinja"]
    templated = load_tokenizer(write_tokenizer(tmp_path, template=template))
    expected = encode_chat(templated, "hello", system=system)
    templated.chat_template = None
    assert encode_chat(templated, "hello", system=system) == expected


def test_template_of_the_tokenizer_config_is_used_too(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat_template="{{ messages[-1].role }}"))
    assert encode_chat(tokenizer, "hello", system="x") == list(b"user")


@pytest.mark.parametrize("template", ["{{ raise_exception('no system turn') }}", "{% if %}"])
def test_template_that_fails_names_the_way_around_it(tmp_path, template):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(OledError, match=r"chat template fails: .*--raw"):
        encode_chat(tokenizer, "hello")


def test_decode_skips_special_tokens_and_survives_ids_without_text(plain):
    ids = [*b"a", SPECIAL["<|mask|>"], 318, 100_000, 2**31 - 1, *b"b", SPECIAL["<|endoftext|>"]]
    assert decode(plain, ids) == "ab"
    assert decode(plain, np.array([*b"a , b"], np.int32)) == "a , b"
    assert decode(plain, []) == ""
    assert decode(plain, "é".encode()[:1]) == "\ufffd"


def test_text_that_is_no_unicode_is_one_clear_error():
    with pytest.raises(OledError, match="not valid Unicode at character 1"):
        encode_raw(None, "a\udcff")


def test_offset_of_a_broken_character_is_that_in_the_callers_own_text(plain):
    with pytest.raises(OledError, match=r"the text is not valid Unicode at character 2 \(counted from 0\), '.udc80'"):
        encode_chat(plain, "ab\udc80", system="Be brief.")
    with pytest.raises(OledError, match=r"the system turn is not valid Unicode at character 0 "):
        encode_chat(plain, "ab", system="\ud800")
