"""The demo: answers are equal and counted as the metrics count them, and the picture shows what the records say."""

import sys
from types import SimpleNamespace

import demo
import numpy as np
import pytest
from tasks import KINDS, held_out

from oled_jax.retention import StepRecord
from oled_jax.retention.record import DENOISE, KV_WRITE, PREFILL

LAYERS, EXPERTS = 2, 16
# Sequence, block and phase of each forward: three prompts, of which the second is prefilled.
FORWARDS = [(5, 0, DENOISE), (5, 0, KV_WRITE), (5, 1, DENOISE), (6, 0, PREFILL), (6, 1, DENOISE), (7, 1, DENOISE)]


@pytest.fixture
def records():
    """Random ones, in which whoever is admitted was wanted and not resident."""
    rng = np.random.default_rng(0)
    made = []
    for number, (sequence, block, phase) in enumerate(FORWARDS):
        counts = rng.integers(0, 3, (LAYERS, EXPERTS), dtype=np.int32)
        resident, chosen = rng.random((2, LAYERS, EXPERTS)) < 0.5
        one = {"sequence": sequence, "block": block, "step": 0, "phase": phase}
        rows = {name: np.array([value], np.int32) for name, value in one.items()}
        sets = {"resident": resident, "admitted": chosen & (counts > 0) & ~resident, "evicted": np.zeros_like(resident)}
        made.append(StepRecord(forward=number, counts=counts, **rows, **sets))
    return made


@pytest.fixture
def no_matplotlib(monkeypatch):
    """Matplotlib is missing, imported before or not."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


def decoding(records, layer):
    """Hits and misses of a layer's decoding forwards, counted from the records alone."""
    wanted = [(r.counts[layer] > 0, r.resident[layer]) for r in records if r.phase[0] != PREFILL]
    return sum(int((w & r).sum()) for w, r in wanted), sum(int((w & ~r).sum()) for w, r in wanted)


def columns(line):
    return line[10:]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("characters", [demo.CHARACTERS, demo.PLAIN_CHARACTERS])
def test_picture_agrees_with_the_records(records, layer, characters):
    picture = demo.picture_of(records, layer)
    hits, misses = decoding(records, layer)
    assert (picture.count(demo.HIT), picture.count(demo.KEPT, demo.PASSING)) == (hits, misses)
    rows = demo.text_of(picture, characters)[2:]
    assert [len(columns(row)) for row in rows] == [EXPERTS] * len(FORWARDS)
    drawn = "".join(columns(row) for row, r in zip(rows, records, strict=True) if r.phase[0] != PREFILL)
    assert drawn.count(characters[demo.HIT]) == hits
    assert drawn.count(characters[demo.KEPT]) + drawn.count(characters[demo.PASSING]) == misses
    for row, record in zip(rows, records, strict=True):
        kept = [expert for expert in range(EXPERTS) if columns(row)[expert] == characters[demo.KEPT]]
        assert kept == np.flatnonzero(record.admitted[layer]).tolist()


def test_text_names_prompts_and_blocks_where_they_begin(records):
    rows = demo.text_of(demo.picture_of(records, 0), demo.PLAIN_CHARACTERS)[2:]
    names = ["1 block 0", "  KV", "1 block 1", "2 prefill", "2 block 1", "3 block 1"]
    assert [row[:10].rstrip() for row in rows] == names


def test_text_fits_a_terminal_and_says_what_it_leaves_out(records):
    many = [record._replace(counts=np.ones((LAYERS, 64)), resident=np.ones((LAYERS, 64), bool)) for record in records]
    many = [record._replace(admitted=np.zeros((LAYERS, 64), bool)) for record in many] * 10
    lines = demo.text_of(demo.picture_of(many, 0), demo.CHARACTERS)
    assert len(lines) <= 34 and max(map(len, lines)) <= 80
    assert lines[-1] == "... and 30 forwards more"


@pytest.mark.parametrize("encoding", [None, "ascii", "latin-1", "no such encoding"])
def test_plain_characters_where_the_others_cannot_be_shown(encoding):
    assert demo.characters_for(encoding) == demo.PLAIN_CHARACTERS
    assert demo.characters_for("utf-8") == demo.CHARACTERS


def test_prompts_are_held_out():
    known = {example.prompt for task in KINDS for example in held_out(task, 6, 0)}
    assert set(demo.PROMPTS) <= known


def test_png(records):
    figure = pytest.importorskip("matplotlib.figure", reason="the extra `plots` is not installed")
    assert demo.png_of(demo.picture_of(records, 0), "title", figure.Figure).startswith(b"\x89PNG")


@pytest.mark.slow
def test_demo_runs(tmp_path, capsys, monkeypatch):
    seen, picture_of = [], demo.picture_of
    monkeypatch.setattr(demo, "picture_of", lambda *given: seen.append(given) or picture_of(*given))
    folder = tmp_path / "new" / "demo"
    assert demo.main([str(folder), "--prompts", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n  equal; ") == 2 and "DIFFER" not in out
    records, layer = seen[0]
    totals = [decoding(records, index) for index in range(7)]
    hits, misses = totals[layer]
    assert f"Layer {layer + 1}: {hits} hits, {misses} misses while decoding" in out
    hits, misses = map(sum, zip(*totals, strict=True))
    assert f"{hits:,} hits, {misses:,} misses (hit rate {hits / (hits + misses):.0%}), {misses:,} experts loaded" in out
    written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert written == ([] if "was not drawn" in out else ["retained_experts.png"])


def test_differing_answers_are_told_and_end_with_1(tmp_path, capsys, monkeypatch, no_matplotlib, records):
    """Engines that answer what is wanted here, since the real ones do not differ."""

    class Tampered:
        config = tokenizer = SimpleNamespace(moe_layers=(1, 2))

        def __init__(self, experts, tokens):
            traffic = SimpleNamespace(hits=(1, 2), misses=(3, 4), loads=(3, 4))
            placed = {"experts_on_device": experts, "num_experts": 16, "policy": "lru"}
            placed = SimpleNamespace(**placed, decode=traffic, bytes_moved=2_000_000)
            counts = {"generated_tokens": len(tokens), "num_forwards": 2, "num_commits": 1}
            self.answer = SimpleNamespace(tokens=tokens, metrics=SimpleNamespace(experts=placed, **counts))

        def generate(self, ids, rule, *, gen_length, on_record=None):
            for record in records if on_record else ():
                on_record(record)
            return self.answer

    monkeypatch.setattr(demo, "encode_chat", lambda tokenizer, text: [1])
    monkeypatch.setattr(demo, "decode", lambda tokenizer, ids: str(ids))

    def load(path, experts_on_device=None, **options):
        return Tampered(4, [7, 9]) if experts_on_device else Tampered(16, [7, 8])

    monkeypatch.setattr(demo.Engine, "load", load)
    assert demo.main([str(tmp_path / "demo"), "--prompts", "1"]) == 1
    captured = capsys.readouterr()
    assert "THE TOKENS DIFFER: [7, 8] and [7, 9]" in captured.out and "equal" not in captured.out
    assert "was not drawn, since matplotlib is missing: pip install -e '.[plots]'" in captured.out
    assert captured.err == "demo: 1 of 1 prompt answered differently\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0"], "--prompts is 0: give an integer from 1 to 6"),
        (["--layer", "0"], "--layer 0 has no experts: give a layer from 1 to 7"),
        (["--policy", "best"], "best"),
        (["--experts-on-device", "0"], "experts_on_device"),
        (["--steps", "3"], "unrecognized arguments: --steps 3 (see demo --help)"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(options, message, tmp_path, capsys):
    assert demo.main([str(tmp_path / "demo"), *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("demo: error: ") and message in captured.err and captured.err.count("\n") == 1
    assert captured.out == "" and not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "demo").write_text("mine")
    assert demo.main([str(tmp_path / "demo")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"demo: error: {tmp_path / 'demo'}") and captured.err.count("\n") == 1
    assert captured.out == "" and (tmp_path / "demo").read_text() == "mine"
