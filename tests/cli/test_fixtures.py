"""The command line on the real engine: the tokens of the fixtures."""

import json
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
TINY, TINY22 = GOLDEN / "llada2-tiny-f32", GOLDEN / "llada22-tiny-f32"


def arguments_of(case):
    """The command line of a fixture's case."""
    flags = {key: value for key, value in case.items() if key not in ("prompt_ids", "output_ids", "num_forwards")}
    early = "--eos-early-stop" if flags.pop("eos_early_stop", False) else "--no-eos-early-stop"
    listed = [str(part) for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", value)]
    return ["--prompt-ids", ",".join(map(str, case["prompt_ids"])), early, *listed]


@pytest.mark.parametrize(
    ("folder", "file", "decoding", "index"),
    [
        (TINY, "generate_editing.json", ("--decoding", "editing"), 2),
        (TINY22, "generate_levenshtein.json", (), 1),
    ],
)
def test_fixture_from_the_command_line(generate, capsys, folder, file, decoding, index):
    case = json.loads((folder / file).read_text())[index]
    assert generate(folder, *arguments_of(case), *decoding, "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert result["output_ids"] == case["output_ids"]
    assert result["num_forwards"] == case.get("num_forwards", result["metrics"]["num_forwards"]) > 0
    assert result["text"] is None


def test_prompts_file_gives_what_each_prompt_gives_alone(generate, tmp_path, capsys):
    cases = json.loads((TINY / "generate.json").read_text())
    same = [case for case in cases if {**cases[0], **{k: case[k] for k in ("prompt_ids", "output_ids")}} == case]
    assert len(same) > 1
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": case["prompt_ids"]}) + "\n" for case in same))
    assert generate(TINY, "--prompts-file", prompts, *arguments_of(same[0])[2:], "--json") == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["output_ids"] for result in results] == [case["output_ids"] for case in same]


def test_terminal_ends_with_the_whole_answer(generate, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    case = json.loads((TINY / "generate.json").read_text())[0]
    assert generate(TINY, *arguments_of(case)) == 0
    out, err = capsys.readouterr()
    shown = out.split("\x1b[J")
    assert shown[0].startswith("░ ") or " ░" in shown[0]
    last = "".join(shown[-1].split())  # rows end anywhere
    assert last and "".join(map(str, case["output_ids"])).endswith(last)
    assert err.splitlines()[-1].startswith(f"{len(case['output_ids'])} tokens, ")


def test_block_length_must_fit_the_routing_windows(mistake):
    told = mistake("--prompt-ids", "1,2", "--mask-id", "319", "--block-length", "12", model=TINY22)
    assert "give a multiple of 8" in told
