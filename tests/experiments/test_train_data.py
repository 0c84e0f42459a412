"""Training data: problems on one side only, answers that are right, a lossless tokenizer, batches on the block grid.

Every answer is worked out again from its prompt (``solve``), and every batch is taken apart again with the engine's own
tokenizer, so that what is trained on is what the engine will ask and what is graded.
"""

import argparse
import collections
import heapq
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import batches
import numpy as np
import prefetch
import prompts
import pytest
import tasks
import text
import vocabulary
from batches import BatchConfig, BatchMaker, Curriculum, Mix
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.cli.requests import read_requests
from oled_jax.errors import OledError
from oled_jax.tokenizer import decode, encode_chat, encode_raw, load_tokenizer

TRAIN_FOLDER = Path(tasks.__file__).parent
SYSTEM = "<role>SYSTEM</role>detailed thinking off<|role_end|>"
NO_TEXT = Mix(text=0.0)
HELD_OUT_DOUBLES = [0, 13, 21, 24, 26, 31, 50, 55]  # i of 0 to 59 such that i + i is held out: may never change


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save_tokenizer(vocabulary.train_tokenizer(vocabulary.training_corpus(50), 700), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def python(code: str, **environment: str) -> str:
    """What a fresh Python with the training folder on its path prints."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TRAIN_FOLDER)!r})\n{code}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def samples(name: str, count: int, level: float = 1.0) -> list[tasks.Example]:
    rng = Random(f"test/{name}/{level}")
    return [tasks.KINDS[name].sample(rng, level) for _ in range(count)]


def solve(task: str, prompt: str) -> str:
    """The answer, from the words of the prompt alone."""
    numbers = [int(number) for number in re.findall(r"\d+", prompt)]
    head, _, tail = prompt.partition(": ")
    if task == "copy":
        return tail
    if task == "reverse":
        return " ".join(tail.split()[::-1])
    if task == "replace":
        first, second = re.match(r"\w+ (\w+) \w+(?: every)? (\w+)", head).groups()
        old, new = (first, second) if head.startswith("Replace") else (second, first)
        return re.sub(rf"\b{old}\b", new, tail)
    if task == "template":
        values = re.findall(r"(\w+) = (\w+)", head)
        for slot, value in values:
            tail = tail.replace("{" + slot + "}", value)
        return tail
    if task == "record":
        pairs = [pair.split() for pair in tail.split(", ")]
        return "{" + ", ".join(f'"{k}": {v}' if v.isdigit() else f'"{k}": "{v}"' for k, v in pairs) + "}"
    if task == "sort":
        return " ".join(sorted(tail.split()))  # numbers have two digits each
    if task == "add":
        return str(sum(numbers))
    if task == "sequence":
        step = numbers[1] - numbers[0]
        return ", ".join(str(numbers[-1] + step * i) for i in (1, 2, 3))
    if task == "count":
        if "words" in head:
            return str(len(tail.split()))
        word = re.match(r"How many times does (\w+) occur|Count (\w+) in", head)
        return str(tail.split().count(word[1] or word[2]))
    if task == "lookup":
        key = re.search(r"What does (\w+) have|Look up (\w+)\.", prompt)
        key = key[1] or key[2]
        return next(v for k, v in re.findall(r'"?(\w+)"?:? "?(\w+)"?(?:[,}]|$| Look)', prompt) if k == key)
    if task == "largest":
        return str(max(numbers) if "largest" in prompt else min(numbers))
    words = re.match(r"(?:Which is the \w+ word:|Give the \w+ word of) (.*)", prompt)[1].split()
    which = re.search(r"the (\w+) word", prompt)[1]
    order = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]
    return words[-1] if which == "last" else words[order.index(which)]


@pytest.mark.parametrize("name", tasks.KINDS)
@pytest.mark.parametrize("level", [0.0, 0.4, 1.0])
def test_answers_are_right(name, level):
    for example in samples(name, 300, level):
        assert example.task == name
        assert example.answer == solve(name, example.prompt), example


def test_the_sum_that_everyone_asks_for():
    sums = samples("add", 20_000)
    assert sum(bool(re.fullmatch(r"Add \d{3} and \d{3}\.", example.prompt)) for example in sums) > 1000
    assert {len(example.answer) for example in sums} == {1, 2, 3, 4}
    assert tasks.split_of("add", "274 518") == "held-out"  # so that a demonstration shows what was not trained on


@pytest.mark.parametrize("name", tasks.KINDS)
def test_a_problem_is_on_one_side(name):
    problems, sides = {}, collections.defaultdict(set)
    for level in (0.0, 0.5, 1.0):
        for example in samples(name, 1500, level):
            # A prompt that belonged to two problems could be on both sides.
            assert problems.setdefault(example.prompt, example.problem) == example.problem
            sides[tasks.split_of(name, example.problem)].add(example.prompt)
    assert not sides["train"] & sides["held-out"]
    share = len(sides["held-out"]) / len(problems)
    assert 0.09 < share < 0.17


def test_training_never_draws_what_is_held_out():
    for name, kind in tasks.KINDS.items():
        asked = {example.prompt for example in tasks.held_out(name, 100, seed=1)}
        rng = Random(0)
        assert asked.isdisjoint(tasks.draw(kind, rng, 1.0, "train").prompt for _ in range(1000))


def test_phrasing_and_order_of_a_sum_do_not_change_its_side():
    by_pair = collections.defaultdict(set)
    for example in samples("add", 3000, 0.2):
        pair = tuple(sorted(re.findall(r"\d+", example.prompt)))
        by_pair[pair].add((example.prompt, tasks.split_of("add", example.problem)))
    assert max(len(found) for found in by_pair.values()) > 3
    assert all(len({side for _, side in found}) == 1 for found in by_pair.values())


def test_the_split_is_the_same_everywhere():
    held = [i for i in range(60) if tasks.split_of("add", f"{i} {i}") == "held-out"]
    assert held == HELD_OUT_DOUBLES
    code = "import tasks; print(tasks.held_out('template', 5, 3)[4].prompt)"
    here = tasks.held_out("template", 5, 3)[4].prompt
    assert {python(code, PYTHONHASHSEED=seed).strip() for seed in ("1", "2")} == {here}


def test_held_out_examples():
    few, many = tasks.held_out("sequence", 5, seed=0), tasks.held_out("sequence", 150, seed=0)
    assert many[:5] == few
    assert len({example.prompt for example in many}) == 150
    assert {tasks.split_of("sequence", example.problem) for example in many} == {"held-out"}
    assert tasks.held_out("sequence", 5, seed=1) != few
    with pytest.raises(OledError, match="there is no task 'sum': the tasks are copy, reverse"):
        tasks.held_out("sum", 1, seed=0)
    with pytest.raises(OledError, match=r"task 'add' has \d+ held-out prompts at level 0.0: ask for no more"):
        tasks.held_out("add", 1000, seed=0, level=0.0)


@given(
    st.sampled_from([samples(name, 1)[0] for name in tasks.KINDS]),
    st.integers(0, 10**6),
    st.characters(exclude_categories=["Zs", "Cc", "Cs", "Zl", "Zp"]),
)
def test_grading_is_exact(example, place, character):
    answer = example.answer
    assert tasks.grade(example, answer)
    assert tasks.grade(example, f"\n {answer}  \n")
    at = place % len(answer)
    assert not tasks.grade(example, answer[:at] + character + answer[at:])
    assert not tasks.grade(example, answer[:at] + answer[at + 1 :])
    if answer[at] != character:
        assert not tasks.grade(example, answer[:at] + character + answer[at + 1 :])


def test_a_level_bounds_the_size():
    for name in tasks.KINDS:
        easy, middle, full = (max(len(e.prompt) for e in samples(name, 500, level)) for level in (0.0, 0.5, 1.0))
        assert easy < full and easy <= middle <= full, name
    assert all(len(re.findall(r"\d", example.prompt)) == 2 for example in samples("add", 300, 0.0))
    lengths = collections.Counter(len(example.answer.split()) for example in samples("copy", 4000))
    assert set(lengths) == set(range(2, 41)) and min(lengths.values()) > 60  # evenly: 103 each


def test_both_calibration_and_evaluation_have_long_and_short_answers():
    for calibration in (True, False):
        kinds = [kind.name for kind in tasks.KINDS.values() if kind.calibration is calibration]
        longest = [max(len(example.answer) for example in samples(name, 200)) for name in kinds]
        assert len(kinds) >= 5 and min(longest) < 8 and max(longest) > 90


def test_documents_are_on_one_side_and_in_order():
    train, held_out = list(text.documents("train")), list(text.documents("held-out"))
    names = [document.name for document in train + held_out]
    assert len(set(names)) == len(names) > 400
    modules = [{d.name.partition("/")[2] for d in side} for side in (train, held_out)]
    assert modules[0].isdisjoint(modules[1])
    assert {name.partition("/")[0] for name in names} == {"topic", "doc", "source"}
    by_name = {document.name: document.text for document in train + held_out}
    assert by_name["source/heapq.py"] == Path(heapq.__file__).read_text(encoding="utf-8")
    prose = by_name["doc/heapq.py"]
    assert inspect.getdoc(heapq) in prose and inspect.getdoc(heapq.merge) in prose
    assert heapq.__about__.strip() not in prose and "return result" not in prose
    code = "import text; print(*(d.name for d in text.documents('held-out')))"
    assert python(code, PYTHONHASHSEED="5").split() == [document.name for document in held_out]


def test_training_a_tokenizer_twice_gives_the_same_bytes(folder, tmp_path):
    code = f"""
from pathlib import Path
from vocabulary import *
save_tokenizer(train_tokenizer(training_corpus(50), 700), Path({str(tmp_path)!r}) / "again")
"""
    python(code, PYTHONHASHSEED="7")
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@given(st.text())
@settings(max_examples=300)
def test_any_text_survives_the_tokenizer(tokenizer, words):
    if not any(special in words for special in vocabulary.SPECIAL_IDS):
        assert decode(tokenizer, encode_raw(tokenizer, words)) == words


@given(st.binary())
def test_any_bytes_have_pieces(tokenizer, raw):
    words = raw.decode("latin-1")
    assert decode(tokenizer, encode_raw(tokenizer, words)) == words


@given(st.text(alphabet="0123456789 .,a", min_size=1))
def test_digits_are_pieces_of_their_own(tokenizer, words):
    pieces = tokenizer.convert_ids_to_tokens(encode_raw(tokenizer, words))
    assert [piece for piece in pieces if any(map(str.isdigit, piece))] == [c for c in words if c.isdigit()]


def test_the_vocabulary_is_full_and_special_tokens_lead_it(folder, tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(700))
    expected = {"<|endoftext|>": 0, "<|mask|>": 1, "<|role_end|>": 2, "<role>": 3, "</role>": 4}
    assert expected == vocabulary.SPECIAL_IDS
    for special, number in expected.items():
        assert encode_raw(tokenizer, f"a{special}b")[1] == number
        assert decode(tokenizer, [number]) == ""
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 0, 1)
    words = " ".join(vocabulary.WORDS)
    assert len(encode_raw(tokenizer, words)) < 2 * len(vocabulary.WORDS)
    with pytest.raises(OledError, match="a vocabulary of 260 has no room for 256 bytes and the special tokens: at l"):
        vocabulary.train_tokenizer([], 260)


def test_transformers_loads_the_folder_as_the_engine_does(folder, tokenizer):
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(folder))
    turns = [{"role": "user", "content": "Add 274 and 518."}]
    template = {"add_generation_prompt": True, "tokenize": False}
    assert auto.apply_chat_template(turns, **template) == tokenizer.apply_chat_template(turns, **template)
    assert auto("naïve 274", add_special_tokens=False)["input_ids"] == encode_raw(tokenizer, "naïve 274")
    assert (auto.eos_token, auto.mask_token, len(auto)) == ("<|endoftext|>", "<|mask|>", 700)


def test_chat_template_is_the_form_of_the_family(tokenizer):
    literal = SYSTEM + "<role>HUMAN</role>Hi <there><|role_end|><role>ASSISTANT</role>"
    assert encode_chat(tokenizer, "Hi <there>") == encode_raw(tokenizer, literal)
    assert literal == vocabulary.BEFORE_USER + "Hi <there>" + vocabulary.BEFORE_ANSWER
    brief = literal.replace("detailed", "Be brief.\ndetailed")
    assert encode_chat(tokenizer, "Hi <there>", system="Be brief.") == encode_raw(tokenizer, brief)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        SYSTEM + "<role>HUMAN</role>a<|role_end|><role>ASSISTANT</role>b<|role_end|><role>HUMAN</role>c<|role_end|>"
    )


def segments_of(row: batches.Batch) -> list[batches.Batch]:
    """A row's segments, each as a Batch of 1-D arrays, found by where the numbers change."""
    bounds = [0, *(np.flatnonzero(np.diff(row.segment)) + 1), len(row.segment)]
    return [batches.Batch(*(array[a:b] for array in row)) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"rows": 24}, 0),
        ({"rows": 24}, 9000),
        ({"rows": 24, "split": "held-out"}, 9000),
        ({"rows": 5, "length": 448}, 7),
    ],
    ids=["begin", "full level", "held out", "longer rows"],
)
def test_a_batch_holds_what_the_engine_would_hold(folder, tokenizer, options, step):
    config = BatchConfig(str(folder), **options)
    batch = BatchMaker(config)(3, step)
    assert all(array.shape == (config.rows, config.length) for array in batch)
    assert [array.dtype for array in batch] == [np.int32, np.int32, np.int32, np.bool_, np.int32]
    documents = [document.text for document in text.documents(config.split)]
    seen = collections.Counter()
    for i in range(config.rows):
        start = 0
        for number, segment in enumerate(segments_of(batches.Batch(*(array[i] for array in batch))), start=1):
            length = len(segment.tokens)
            assert start % 32 == 0 and length % 32 == 0
            start += length
            assert set(segment.segment) == {number}
            assert segment.position.tolist() == list(range(length))
            (kind,) = {batches.KIND_NAMES[k] for k in segment.kind}
            seen[kind] += 1
            ids = segment.tokens.tolist()
            if kind == "text":
                assert segment.answer.all()
                words = decode(tokenizer, ids).strip("\ufffd")  # a character may be cut in two
                assert any(words in document for document in documents)
                continue
            prompt_length = int(np.argmax(segment.answer))
            assert segment.answer[prompt_length:].all()
            prompt = tokenizer.decode(ids[:prompt_length])
            asked = re.fullmatch(r".*<role>HUMAN</role>(.*)<\|role_end\|><role>ASSISTANT</role>", prompt)[1]
            assert ids[:prompt_length] == encode_chat(tokenizer, asked)
            said = [*encode_raw(tokenizer, solve(kind, asked)), 2, 0]
            assert ids[prompt_length:] == said + [0] * (-(prompt_length + len(said)) % 32)
            if kind == "add":
                problem = " ".join(sorted(re.findall(r"\d+", asked), key=int))
                assert tasks.split_of("add", problem) == config.split
    assert seen["text"] and len(seen) >= 10


def test_answers_take_one_to_four_blocks(folder):
    maker = BatchMaker(BatchConfig(str(folder), rows=1, mix=NO_TEXT))
    rng = Random(0)
    blocks = collections.Counter()
    for name in tasks.KINDS:
        for _ in range(100):
            segment = maker.task_segment(rng, name, 1.0)
            end = segment.tokens.index(2, segment.prompt_length)  # the answer's own role end
            blocks[1 + end // 32 - segment.prompt_length // 32] += 1
    assert {1, 2, 3, 4} <= set(blocks) and max(blocks) <= 5


def test_shares_are_those_of_the_mix(folder):
    maker = BatchMaker(BatchConfig(str(folder), rows=48, mix=Mix(text=0.1)))
    made = [maker(0, 5000 + i) for i in range(12)]
    kind, first = (np.concatenate(arrays) for arrays in ([b.kind for b in made], [b.position == 0 for b in made]))
    assert all((batch.segment > 0).all() for batch in made)
    assert 0.09 < (kind == 0).mean() < 0.11
    frequencies = dict(maker.config.mix.tasks)
    total = (first & (kind > 0)).sum()
    for number, name in enumerate(batches.KIND_NAMES[1:], start=1):
        share = frequencies[name] / sum(frequencies.values())
        deviation = (share * (1 - share) / total) ** 0.5
        assert abs((first & (kind == number)).sum() / total - share) < 4 * deviation, name


def test_without_text_what_is_left_over_is_marked(folder):
    mix = Mix(text=0.0, tasks=(("template", 1.0),))
    batch = BatchMaker(BatchConfig(str(folder), rows=8, mix=mix))(0, 5000)
    empty = batch.segment == 0
    assert empty.any() and set(batch.kind[~empty]) == {batches.KIND_NAMES.index("template")}
    assert not batch.answer[empty].any() and not batch.position[empty].any() and not batch.tokens[empty].any()


def test_a_batch_follows_from_seed_and_step(folder):
    config = BatchConfig(str(folder), rows=4, mix=NO_TEXT)
    first, second = BatchMaker(config), BatchMaker(config)
    made = {step: first(0, step) for step in (0, 1, 2, 3)}
    for step in (3, 1):
        assert all(map(np.array_equal, made[step], second(0, step)))
    distinct = {made[step].tokens.tobytes() for step in made} | {first(1, 0).tokens.tobytes()}
    assert len(distinct) == 5


@pytest.mark.parametrize("workers", [1, 3])
def test_prefetched_batches_are_the_same_from_any_step_on(folder, workers):
    config = BatchConfig(str(folder), rows=4, mix=Mix(text=0.06) if workers == 1 else NO_TEXT)
    maker = BatchMaker(config)
    with prefetch.Prefetcher(config, seed=5, first_step=1234, workers=workers) as ahead:
        got = list(itertools.islice(ahead, 7))
    assert [step for step, _ in got] == list(range(1234, 1241))
    for step, batch in got:
        for array, expected in zip(batch, maker(5, step), strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)


def test_a_worker_that_ends_is_an_error(folder, tmp_path, capfd):
    with (
        prefetch.Prefetcher(BatchConfig(str(tmp_path), rows=1), seed=0, workers=2) as ahead,
        pytest.raises(OledError, match="a worker that makes batches has ended with code 2"),
    ):
        next(iter(ahead))
    assert f"error: {tmp_path}/tokenizer.json does not exist" in capfd.readouterr().err
    with pytest.raises(OledError, match="0 workers make no batches"):
        prefetch.Prefetcher(BatchConfig(str(folder), rows=1), seed=0, workers=0)


def test_workers_end_when_their_reader_is_gone(folder):
    code = f"""
import os, batches, prefetch
config = batches.BatchConfig({str(folder)!r}, rows=2, mix=batches.Mix(text=0.0))
ahead = prefetch.Prefetcher(config, seed=0, workers=1)
next(iter(ahead))
print("made", flush=True)
os._exit(0)
"""
    # The worker shares stderr: reading that to its end waits until the worker has ended, or fails by the timeout.
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TRAIN_FOLDER)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("made\n", "")


def test_workers_import_no_jax():
    code = "import prefetch; print([name for name in ('jax', 'flax', 'transformers') if name in sys.modules])"
    assert python(code).strip() == "[]"


def test_curriculum_by_hand():
    curriculum = Curriculum(start=0.2, steps=100)
    assert [curriculum.level(step) for step in (0, 50, 100, 9999)] == pytest.approx([0.2, 0.6, 1.0, 1.0])
    assert Curriculum(steps=0).level(0) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mix(tasks=(("sum", 1.0),)), "there is no task 'sum'"),
        (lambda: Mix(tasks=(("add", -1.0),)), "frequency of add is -1.0, must not be negative"),
        (lambda: Mix(tasks=()), "no task has a frequency above 0"),
        (lambda: Mix(text=1.5), "text share 1.5 is no share: give 0 to 1"),
        (lambda: BatchConfig("x", rows=0), "0 rows of 256 tokens in blocks of 32: give positive numbers"),
        (lambda: BatchConfig("x", rows=1, length=100), "1 rows of 100 tokens in blocks of 32"),
        (lambda: BatchConfig("x", rows=1, split="test"), "split 'test' is unknown: train or held-out"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(OledError, match=re.escape(message)):
        make()


def test_rows_too_short_for_a_kind_and_foreign_tokenizers_are_named(folder, tmp_path):
    short = BatchConfig(str(folder), rows=2, length=32, mix=Mix(text=0.0, tasks=(("template", 1.0),)))
    with pytest.raises(OledError, match=r"examples of 'template' at level 1\.0 do not fit 32 tokens: give longer rows"):
        BatchMaker(short)(0, 9999)
    foreign = json.loads((folder / "tokenizer.json").read_text().replace("<|mask|>", "<|pad|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(foreign))
    with pytest.raises(OledError, match=r"has other special tokens than vocabulary\.py writes: run it again"):
        BatchMaker(BatchConfig(str(tmp_path), rows=1, mix=NO_TEXT))


def test_prompts_file_is_what_the_commands_read(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    assert prompts.main([str(path), "--tasks", "add,reverse", "--count", "3", "--seed", "4"]) == 0
    requests = read_requests(argparse.Namespace(prompts_file=path, seed=0))
    expected = [*tasks.held_out("add", 3, 4), *tasks.held_out("reverse", 3, 4)]
    assert [request.text for request in requests] == [example.prompt for example in expected]
    assert [(request.task, request.split) for request in requests] == (
        [("add", "calibration")] * 3 + [("reverse", "evaluation")] * 3
    )
    assert [request.id for request in requests][2:4] == ["add-0002", "reverse-0000"]
    assert "6 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jsonl", "--tasks", "sum"], "there is no task 'sum'"),
        (["a.jsonl", "--count", "0"], "--count is 0: give 1 or more"),
        (["nowhere/a.jsonl", "--count", "1"], "nowhere/a.jsonl cannot be written: No such file or directory"),
    ],
)
def test_a_mistake_of_the_prompts_command_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert prompts.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_vocabulary_command_refuses_what_cannot_be(tmp_path, capsys):
    assert vocabulary.main([str(tmp_path / "a"), "--size", "100"]) == 2
    error = capsys.readouterr().err
    assert "a vocabulary of 100 has no room" in error and error.count("\n") == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_vocabulary_that_is_shipped_knows_the_words(tmp_path):
    assert vocabulary.main([str(tmp_path / "a")]) == 0
    tokenizer = load_tokenizer(tmp_path / "a")
    assert len(tokenizer) == 1024
    assert all(len(encode_raw(tokenizer, f" {word}")) == 1 for word in (*vocabulary.WORDS, *vocabulary.NAMES))
    maker = BatchMaker(BatchConfig(str(tmp_path / "a"), rows=1, mix=NO_TEXT))
    rng = Random(0)
    assert max(len(maker.task_segment(rng, "add", 1.0).tokens) for _ in range(300)) <= 64
