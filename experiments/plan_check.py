"""The planner's figures beside the device's own: weights are loaded, a prompt is read and a few steps are run.

    python experiments/plan_check.py                                  # two sizes, a process each
    python experiments/plan_check.py --preset llada2.0-mini --experts-on-device 40% --context 4096
    python experiments/plan_check.py --preset llada2.0-mini --layers 4 --experts-on-device all --batch 8 --json FILE

Weights are random and go the way of a real checkpoint's: unit by unit through the device into slots, bank or place. The
ratio is the planned total over ``peak_bytes_in_use`` of the device, which counts loading, compilation (XLA tries
kernels on the device) and running; it should be from 0.95 to 1.05. Where the device tells no peak (a CPU), the planned
workspaces stand beside XLA's alone. A process measures one size, because a peak is never forgotten.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from random_engine import geometry

from oled_jax import Engine, ModelConfig, Threshold, workspace
from oled_jax.checkpoint import Checkpoint
from oled_jax.checkpoint.layout import DTYPES, Unit
from oled_jax.cli.plan import plan_table
from oled_jax.errors import OledError
from oled_jax.loading import load_weights
from oled_jax.offload.budget import choose_budget, device_memory
from oled_jax.offload.offloaded import FORMS
from oled_jax.planner import make_plan

TWO_SIZES = (
    ("--preset", "llada2.0-mini", "--experts-on-device", "40%", "--context", "4096"),
    ("--preset", "llada2.0-mini", "--layers", "8", "--experts-on-device", "25%", "--context", "32768"),
)
KINDS = ("prefill", "denoise")


class RandomCheckpoint(Checkpoint):
    """Weights that are made up as they are read: runs of one pool of normal numbers."""

    format = "random"

    def __init__(self, config: ModelConfig, dtype: np.dtype):
        super().__init__(Path("random"), config, dtype, np.dtype(np.float32))
        largest = max(piece.nbytes // piece.target.dtype.itemsize for unit in self.units() for piece in unit.pieces)
        numbers = 0.02 * np.random.default_rng(0).standard_normal(2**20 + 7, np.float32)
        self._pool = np.resize(numbers.astype(ml_dtypes.bfloat16), largest)

    def read(self, unit: Unit) -> list[np.ndarray]:
        shapes = [(piece.shape, piece.target.dtype) for piece in unit.pieces]
        return [self._pool[: np.prod(shape)].astype(dtype).reshape(shape) for shape, dtype in shapes]

    def fingerprint(self) -> str:
        return "random"

    def describe(self) -> dict[str, Any]:
        return {"layout": "random", "files": 0, "stored_tensors": 0}

    def close(self) -> None:
        pass


def peak() -> int | None:
    """The most bytes of the device that this process has had in use."""
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="its geometry (default: two sizes, one after the other)")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--experts-on-device", default="40%")
    parser.add_argument("--form", default=FORMS[0], choices=FORMS)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--json", help="write the figures into this file")
    args = parser.parse_args()
    if not args.preset:
        if args.json:
            raise OledError("--json is of one size: give --preset")
        for size in TWO_SIZES:
            print(f"==> {' '.join(size)}", flush=True)
            subprocess.run([sys.executable, __file__, *size], check=True)
        return

    config = geometry(args.preset, args.layers)
    dtype = DTYPES[args.dtype]
    placement = {"experts_on_device": args.experts_on_device, "form": args.form, "staging": 4}
    limit = device_memory()
    plan = make_plan(
        config, dtype=dtype, context_length=args.context, batch=args.batch, device_bytes=limit, **placement
    )
    budget = choose_budget(config, dtype, args.context, policy="lru", manager="device", **placement)
    offloaded = plan.experts_on_device is not None
    weights = load_weights(RandomCheckpoint(config, dtype), dtype, bank=offloaded)
    engine = Engine(*weights, context_length=args.context, runner=budget.runner)
    loaded = peak()

    # Every block but the last is the prompt's. No confidence exceeds the threshold, so all of its steps are run.
    prompt = np.random.default_rng(0).integers(0, 1000, args.context - plan.block_length).tolist()
    rule = Threshold(block_length=plan.block_length, threshold=1.0)
    engine.generate_batch([prompt] * args.batch, rule, gen_length=plan.block_length)

    slots = plan.experts_on_device + plan.staging if offloaded else None
    shape = (config, dtype.itemsize, args.context, plan.batch, plan.block_length, slots)
    figures = {
        "plan": plan.to_json(),
        "peak_after_loading": loaded,
        "peak": peak(),
        "workspace": {kind: getattr(workspace, kind)(*shape) for kind in (*KINDS, "tuning")},
        "temporary": {kind: engine.programs.memory(kind).temp_size_in_bytes for kind in KINDS},
    }
    print(plan_table(plan))
    print(f"\n{'workspace':<28}{'planned GB':>11}{'XLA GB':>9}")
    for kind in KINDS:
        print(f"  {kind:<26}{figures['workspace'][kind] / 1e9:11.3f}{figures['temporary'][kind] / 1e9:9.3f}")
    print(f"  {'choosing kernels':<26}{figures['workspace']['tuning'] / 1e9:11.3f}")
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    if figures["peak"] is None:
        print(f"\n{device}: this device tells no peak; planned {plan.device.total / 1e9:.3f} GB")
    else:
        print(f"\n{device}: peak {loaded / 1e9:.3f} GB after loading, {figures['peak'] / 1e9:.3f} GB in the end")
        print(f"planned {plan.device.total / 1e9:.3f} GB, ratio {plan.device.total / figures['peak']:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    try:
        main()
    except OledError as error:
        sys.exit(f"plan_check: error: {error}")
