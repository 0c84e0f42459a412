"""Time and peak host memory of ``Engine.load``, beside the bytes of the final arrays.

    python experiments/bench_load.py PATH [--dtype float32]

Peak memory is the operating system's figure for this process (``ru_maxrss``); what the interpreter and its libraries
hold before loading is shown apart. On a CPU the final arrays lie in that memory, on an accelerator they do not.
"""

import argparse
import resource
import sys
import time

import jax

from oled_jax import Engine, OledError


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a checkpoint folder of either form")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    platform = jax.devices()[0].platform
    before = peak_bytes()
    began = time.perf_counter()
    engine = Engine.load(args.path, dtype=args.dtype, context_length=1024)
    arrays = engine.programs.weights()
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - began
    final = sum(array.nbytes for array in arrays)
    on_host = final if platform == "cpu" else 0
    print(f"{platform}: {final / 1e9:.3f} GB of final arrays in {seconds:.1f} s, {final / 1e6 / seconds:.0f} MB/s")
    print(
        f"peak host memory {peak_bytes() / 1e9:.3f} GB = final arrays {on_host / 1e9:.3f} + before loading "
        f"{before / 1e9:.3f} + {(peak_bytes() - on_host - before) / 1e9:.3f}"
    )


if __name__ == "__main__":
    try:
        main()
    except OledError as error:
        sys.exit(f"bench_load: error: {error}")
