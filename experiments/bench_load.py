"""Time and peak host memory of ``Engine.load``, beside the bytes of the final arrays.

    python experiments/bench_load.py PATH [--dtype float32] [--experts-on-device 40%]

Peak memory is the operating system's figure for this process (``ru_maxrss``); what the interpreter and its libraries
hold before loading is shown apart. On a CPU all final arrays lie in that memory, on an accelerator only the bank.
"""

import argparse
import resource
import sys
import time

import jax

from oled_jax import Engine, OledError
from oled_jax.progress import ProgressLine


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a checkpoint folder of either form")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--experts-on-device", help="a budget: the experts go into pinned host memory")
    args = parser.parse_args()
    platform = jax.devices()[0].platform
    before = peak_bytes()
    began = time.perf_counter()
    placement = {"experts_on_device": args.experts_on_device, "progress": ProgressLine("loading")}
    engine = Engine.load(args.path, dtype=args.dtype, context_length=1024, **placement)
    arrays = [*engine.programs.weights(), *jax.tree.leaves(engine.experts.state)]
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - began
    bank = sum(array.nbytes for array in arrays if array.sharding.memory_kind == "pinned_host")
    final = sum(array.nbytes for array in arrays)
    on_host = final if platform == "cpu" else bank
    print(
        f"{platform}: {final / 1e9:.3f} GB of final arrays ({bank / 1e9:.3f} of them pinned) in {seconds:.1f} s, "
        f"{final / 1e6 / seconds:.0f} MB/s"
    )
    print(
        f"peak host memory {peak_bytes() / 1e9:.3f} GB = final arrays there {on_host / 1e9:.3f} + before loading "
        f"{before / 1e9:.3f} + {(peak_bytes() - on_host - before) / 1e9:.3f}"
    )


if __name__ == "__main__":
    try:
        main()
    except OledError as error:
        sys.exit(f"bench_load: error: {error}")
