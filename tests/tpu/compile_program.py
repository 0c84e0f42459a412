"""Compiles programs of LLaDA2.0-mini for one chip of a TPU v5e that is not there, and prints their memory figures.

A process of its own, started by ``test_compile``: libtpu reads the environment once, when it is loaded. Nothing is
allocated; weights, bank, slots and cache are shapes. KIND is ``denoise`` (with what else a block needs), ``prefill``
(the last chunk of a prompt that fills the context) or ``unclean`` (a load done wrong); the output one JSON object.

    python -m tests.tpu.compile_program KIND [FORM]
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.topologies import get_topology_desc

from oled_jax import ModelConfig, Threshold
from oled_jax.decoding.chunks import ChunkPlan
from oled_jax.decoding.programs import Entry, Programs, Staged
from oled_jax.model.experts import ExpertWeights
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.transformer import LLaDA2
from oled_jax.offload.offloaded import OffloadedExperts
from oled_jax.retention import policy_by_name

CONFIG = ModelConfig.from_preset("llada2.0-mini")
DTYPE = jnp.dtype(jnp.bfloat16)
EXPERTS, STAGING, CONTEXT = 100, 4, 4096

FIGURES = ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_temp")


@functools.cache
def chip() -> jax.Device:
    """One of four; always the same object, since JAX holds chips of two descriptions for different ones."""
    return get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


def placed(tree, memory="device"):
    """``tree`` of shapes, in a memory of the chip."""
    sharding = jax.sharding.SingleDeviceSharding(chip(), memory_kind=memory)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


class Shapes:
    """A run of mini under a budget, with shapes in place of arrays."""

    def __init__(self, form: str):
        experts, width, hidden = CONFIG.num_experts, CONFIG.moe_intermediate_size, CONFIG.hidden_size
        shapes = ((experts, 2 * width, hidden), (experts, width, hidden))
        layer = ExpertWeights(*(jax.ShapeDtypeStruct(shape, DTYPE) for shape in shapes))
        bank = placed(dict.fromkeys(CONFIG.moe_layers, layer), "pinned_host")
        runner = OffloadedExperts(experts, EXPERTS, policy_by_name("lru"), STAGING, form)
        self.state = placed(jax.eval_shape(runner.init, bank)[1])
        self.rule = Threshold(mask_id=0, eos_id=1)
        self.chunks = ChunkPlan.of(CONFIG, self.rule.block_length, 1)
        self.rows = self.chunks.cache_length(CONTEXT)
        self.cache = placed(jax.eval_shape(functools.partial(KVCache.zeros, CONFIG, 1, self.rows, DTYPE)))
        self.programs = Programs(placed(LLaDA2.abstract(CONFIG, DTYPE)), runner, bank)

    def prefill(self) -> None:
        """Compiles the last chunk of a prompt that fills the context."""
        tokens = np.zeros((1, self.chunks.largest), np.int32)
        start = np.full(1, self.rows - self.chunks.largest, np.int32)
        prompt = (tokens, start, tokens == 0, np.zeros(1, np.int32))
        self.programs.prefill(self.cache, self.state, *prompt, self.rule.block_length)

    def denoise(self) -> None:
        """Compiles the programs of the context's last block, each with what the one before it gives."""
        programs, program = self.programs, self.rule.program()
        params = self.rule.params(program.block_length, CONFIG.vocab_size)
        start, yes, tokens = np.zeros(1, np.int32), np.ones(1, bool), np.zeros((1, program.block_length), np.int32)
        # This one takes nothing from the chip, and so is compiled for the CPU.
        rows = placed(programs.new_rows(program, params, np.zeros(1, np.uint32), start))
        rows = programs.enter(program, params, rows, Entry(yes, start, tokens, tokens > 0, yes, yes))
        staged = placed(jax.eval_shape(functools.partial(Staged.zeros, block_length=program.block_length), self.cache))
        furthest = self.rows - program.block_length
        _, staged, *_ = programs.denoise(program, params, self.cache, staged, self.state, rows, furthest)
        programs.commit(self.cache, staged, start, tokens == 0)


def unclean():
    """What must not happen in a load: the slice is widened before it moves, and so on the host."""

    def widened(experts, index):
        one = lax.dynamic_slice(experts, (index, 0, 0), (1, *experts.shape[1:])).astype(jnp.float32)
        return jax.device_put(one, jax.memory.Space.Device)

    experts = placed(jax.ShapeDtypeStruct((16, 128, 256), jnp.bfloat16), "pinned_host")
    index = placed(jax.ShapeDtypeStruct((), jnp.int32))
    return jax.jit(widened).lower(experts, index).compile().memory_analysis()


def main(kind: str, form: str = "load-then-compute") -> None:
    if kind == "unclean":
        memories = {kind: unclean()}
    else:
        shapes = Shapes(form)
        getattr(shapes, kind)()
        kinds = ("denoise", "commit") if kind == "denoise" else (kind,)
        memories = {of: shapes.programs.memory(of) for of in kinds}
    figures = {
        of: {name: getattr(memory, f"{name}_size_in_bytes") for name in FIGURES} for of, memory in memories.items()
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
