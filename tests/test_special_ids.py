"""Where special ids come from, in which order, and what is refused."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oled_jax.config import ModelConfig
from oled_jax.errors import ConfigError, OledError
from oled_jax.special_ids import SpecialIds, find_special_ids, require

GOLDEN = Path(__file__).parent / "golden"


def config(**changes) -> ModelConfig:
    bare = {"pad_token_id": None, "eos_token_id": None}
    return dataclasses.replace(ModelConfig.from_hf(GOLDEN / "llada2-tiny-f32"), **{**bare, **changes})


def tokenizer(vocab: dict[str, int], mask_token_id=None, eos_token_id=None):
    return SimpleNamespace(get_vocab=lambda: vocab, mask_token_id=mask_token_id, eos_token_id=eos_token_id)


def write_generation_config(folder: Path, **values) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_nothing_is_known_of_a_small_vocabulary(tmp_path):
    ids = find_special_ids(tmp_path, config(), None)
    assert ids == SpecialIds(None, None, None, None, vocab_size=320)


def test_published_vocabulary_has_published_ids(tmp_path):
    ids = find_special_ids(tmp_path, config(vocab_size=157184), None)
    assert (ids.mask_id, ids.eos_id) == (156895, (156892,))


def test_published_vocabulary_yields_to_every_other_source(tmp_path):
    words = tokenizer({"<|mask|>": 7, "<|endoftext|>": 8})
    ids = find_special_ids(tmp_path, config(vocab_size=157184), words)
    assert (ids.mask_id, ids.eos_id) == (7, (8,))


def test_tokenizer_token_comes_before_what_the_tokenizer_calls_special(tmp_path):
    ids = find_special_ids(tmp_path, config(), tokenizer({"<|mask|>": 7, "<|endoftext|>": 8}, 9, 10))
    assert (ids.mask_id, ids.eos_id) == (7, (8,))
    ids = find_special_ids(tmp_path, config(), tokenizer({}, 9, 10))
    assert (ids.mask_id, ids.eos_id) == (9, (10,))


def test_config_comes_before_the_tokenizer(tmp_path):
    words = tokenizer({"<|mask|>": 7, "<|endoftext|>": 8})
    ids = find_special_ids(tmp_path, config(mask_token_id=3, eos_token_id=4, pad_token_id=5), words)
    assert (ids.mask_id, ids.eos_id) == (3, (4,))


def test_padding_stands_in_for_the_end_before_the_tokenizer(tmp_path):
    assert find_special_ids(tmp_path, config(pad_token_id=316), tokenizer({"<|endoftext|>": 8})).eos_id == (316,)


def test_generation_config_comes_first_and_may_list_several_ends(tmp_path):
    write_generation_config(tmp_path, eos_token_id=[300, 301], mask_token_id=302)
    ids = find_special_ids(tmp_path, config(mask_token_id=3, eos_token_id=4), None)
    assert (ids.mask_id, ids.eos_id) == (302, (300, 301))


@pytest.mark.parametrize("nothing", [None, []])
def test_generation_config_that_says_nothing_is_passed_over(tmp_path, nothing):
    write_generation_config(tmp_path, eos_token_id=nothing)
    assert find_special_ids(tmp_path, config(eos_token_id=(4, 5)), None).eos_id == (4, 5)


def test_delete_and_split_come_from_the_config():
    folder = GOLDEN / "llada22-tiny-f32"
    ids = find_special_ids(folder, ModelConfig.from_hf(folder), None)
    assert (ids.delete_token_id, ids.split_token_id, ids.eos_id) == (310, 311, (316,))


def test_ids_outside_the_vocabulary_are_all_told(tmp_path):
    write_generation_config(tmp_path, eos_token_id=[319, 320], mask_token_id=-1)
    with pytest.raises(OledError) as raised:
        find_special_ids(tmp_path, config(), None)
    assert "2 problems" in str(raised.value)
    assert "eos_id 320 is outside the vocabulary of 320 tokens" in str(raised.value)
    assert "mask_id -1 is outside" in str(raised.value)


@pytest.mark.parametrize("value", ["319", 3.0, True, [[1]]])
def test_ids_that_are_no_integers_are_refused(tmp_path, value):
    write_generation_config(tmp_path, mask_token_id=value)
    with pytest.raises(OledError, match=r"mask_id is .* expected an integer"):
        find_special_ids(tmp_path, config(), None)


def test_generation_config_that_is_no_json(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        find_special_ids(tmp_path, config(), None)


def test_overriding_by_replace_is_checked():
    ids = SpecialIds(1, (2,), None, None, vocab_size=10)
    assert dataclasses.replace(ids, mask_id=np.int32(9)).mask_id == 9
    with pytest.raises(OledError, match="mask_id 10 is outside"):
        dataclasses.replace(ids, mask_id=10)


def test_require_names_flag_and_argument():
    ids = SpecialIds(1, None, None, None, vocab_size=320)
    assert require(ids, "mask_id") == 1
    with pytest.raises(OledError) as raised:
        require(ids, "eos_id")
    assert str(raised.value) == "eos id is unknown for a vocabulary of 320 tokens: pass --eos-id (eos_id=...)"
    with pytest.raises(OledError, match=r"delete id is unknown .* pass --delete-token-id \(delete_token_id=...\)"):
        require(ids, "delete_token_id")
