"""How close this machine's backend comes to the golden fixtures: a table, in float32 and bfloat16.

    python experiments/golden_report.py [--golden tests/golden]

Per fixture: largest and mean difference of the logits, share of equal argmaxes, and how many of the recorded
generations come out token for token. In bfloat16 not all of them can be expected to (tests/golden/README.md).
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

from oled_jax import Editing, Engine, Levenshtein, Threshold

RULES = {"generate": Threshold, "generate_editing": Editing, "generate_levenshtein": Levenshtein}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", default="tests/golden", help="folder of the fixtures")
    args = parser.parse_args()
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'fixture':26s} {'max |d|':>9s} {'mean |d|':>9s} {'argmax':>7s}  generations equal")
    for folder in sorted(Path(args.golden).iterdir()):
        if not (folder / "forward.npz").exists():
            continue
        engine = Engine.load(folder, context_length=128)
        fixture = np.load(folder / "forward.npz")
        logits = engine.logits(fixture["input_ids"], int(fixture["block_length"]))
        difference = np.abs(logits - fixture["logits"])
        same = np.mean(logits.argmax(-1) == fixture["logits"].argmax(-1))
        outcomes = []
        for name, rule in RULES.items():
            if (folder / f"{name}.json").exists():
                cases = json.loads((folder / f"{name}.json").read_text())
                outcomes.append(f"{name} {sum(equal(engine, rule, case) for case in cases)}/{len(cases)}")
        print(
            f"{folder.name:26s} {difference.max():9.2e} {difference.mean():9.2e} {same:7.4f}  {', '.join(outcomes)}",
            flush=True,
        )


def equal(engine: Engine, rule: type, case: dict) -> bool:
    """Whether ``case`` comes out with the recorded tokens and, where recorded, the recorded number of forwards."""
    expected = {"prompt_ids", "output_ids", "num_forwards", "gen_length"}
    arguments = {key: value for key, value in case.items() if key not in expected}
    generation = engine.generate(case["prompt_ids"], rule(**arguments), gen_length=case["gen_length"])
    forwards = case.get("num_forwards", generation.num_forwards)
    return generation.tokens == case["output_ids"] and generation.num_forwards == forwards


if __name__ == "__main__":
    main()
