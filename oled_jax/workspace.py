"""Bytes of device memory that the compiled programs use while they run, estimated from the shapes in them.

What is live at once was read off XLA's own buffer assignment for an H200, at the geometries of the presets. A forward's
parts (attention, feed-forward, head) follow each other and share their memory, so the largest of them counts, beside
what a forward carries from part to part. Products are accumulated in float32 and rounded by what reads them, so each
stands in memory in float32, and its successor in the model's dtype beside it. A CPU holds more than that: it takes the
cache's rows out for all layers at once, and widens bfloat16 weights. The estimates are for accelerators.

Pure arithmetic; nothing here is exact to the byte, and nothing needs to be.
"""

import dataclasses

from oled_jax.config import ModelConfig
from oled_jax.decoding.chunks import ChunkPlan

FLOAT32 = 4
SMALLEST_WINDOW = 256

# Arrays of the logits' size that are alive together, in halves: greedy decoding has the logits and a copy without the
# mask token; sampling sorts them besides, values and their order, before and after.
GREEDY_LOGITS, SAMPLED_LOGITS = 4, 11


@dataclasses.dataclass(frozen=True)
class _Forward:
    """Shapes of one program: ``batch`` sequences of ``tokens`` each, looking at ``window`` rows of the cache; ``rows``
    experts in the product over slots, 1 where experts are computed one by one."""

    config: ModelConfig
    item: int
    batch: int
    tokens: int
    window: int
    rows: int

    @property
    def count(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.tokens

    def running(self, head: int = 0) -> int:
        """Bytes of its largest part (``head`` bytes for the head) and of what it carries."""
        return max(self._attention(), self._feed_forward(), head) + self._carried()

    def tuning(self) -> int:
        """Bytes of the operands and the result of its largest product over slots."""
        c, item = self.config, self.item
        width, hidden = c.moe_intermediate_size, c.hidden_size
        gate_up = self.rows * 2 * width * hidden * item + self.count * (hidden * item + self.rows * 2 * width * FLOAT32)
        down = self.rows * (width * hidden * item + self.count * (width * item + hidden * FLOAT32))
        return max(gate_up, down)

    def _attention(self) -> int:
        """Scores in float32, probabilities over the cache in the model's dtype, and one layer's cached rows, copied."""
        c = self.config
        scores = c.num_attention_heads * self.count * (self.window * (FLOAT32 + self.item) + self.tokens * FLOAT32)
        return scores + self.batch * self.window * 2 * c.num_key_value_heads * c.head_dim * self.item

    def _feed_forward(self) -> int:
        """Either of the two products over slots, with its operand beside it; or a dense layer's."""
        c = self.config
        width, hidden = c.moe_intermediate_size, c.hidden_size
        gate_up = 2 * width * FLOAT32
        down = hidden * FLOAT32 + width * self.item
        dense = c.intermediate_size * (2 * FLOAT32 + self.item) if c.first_k_dense_replace else 0
        return self.count * max(self.rows * max(gate_up, down), dense)

    def _carried(self) -> int:
        """Queries, keys and values of all layers (they are committed or staged together, at the end, and stay as the
        partial sums of their product until then), the outputs of chosen experts twice, and the residual stream with
        what is being added to it."""
        c = self.config
        heads = c.num_attention_heads + 2 * c.num_key_value_heads
        chosen = 2 * c.num_experts_per_tok * self.item if c.moe_layers else 0
        stream = c.hidden_size * (chosen + 2 * FLOAT32 + self.item)
        return self.count * (c.num_hidden_layers * heads * c.head_dim * (2 * FLOAT32 + self.item) + stream)


def largest_program(
    config: ModelConfig,
    item: int,
    context_length: int,
    batch: int,
    block_length: int,
    slots: int | None,
    sampled: bool,
) -> int:
    """Bytes of the largest workspace: of prefill, of a denoising step, or of choosing their kernels.

    ``item``: bytes per element of the model's dtype; ``slots``: rows per layer, or None at full residency. Covers every
    batch up to ``batch`` (a power of two), since a smaller one runs in the same engine and prefills in longer chunks.
    """
    sizes = []
    while batch:
        shape = (config, item, context_length, batch, block_length, slots)
        sizes += [prefill(*shape), denoise(*shape, sampled=sampled), tuning(*shape)]
        batch //= 2
    return max(sizes)


def prefill(
    config: ModelConfig, item: int, context_length: int, batch: int, block_length: int, slots: int | None
) -> int:
    """Bytes of the last chunk of a prompt that fills the context, with its keys and values, which it gives back."""
    return _prefill_forward(config, item, context_length, batch, block_length, slots).running()


def denoise(
    config: ModelConfig,
    item: int,
    context_length: int,
    batch: int,
    block_length: int,
    slots: int | None,
    *,
    sampled: bool = False,
) -> int:
    """Bytes of a denoising step at the end of the context; ``sampled``: at a temperature above 0."""
    forward = _denoise_forward(config, item, context_length, batch, block_length, slots)
    logits = forward.count * config.vocab_size * FLOAT32
    return forward.running(logits * (SAMPLED_LOGITS if sampled else GREEDY_LOGITS) // 2)


def tuning(
    config: ModelConfig, item: int, context_length: int, batch: int, block_length: int, slots: int | None
) -> int:
    """Bytes of the largest single product, operands included.

    On a GPU, XLA chooses kernels by running the candidates, when a program is compiled, on buffers of their own beside
    everything that is allocated already; the weights among the operands are there twice then.
    """
    shape = (config, item, context_length, batch, block_length, slots)
    forward = _denoise_forward(*shape)
    logits = forward.count * (config.hidden_size * item + config.vocab_size * FLOAT32)
    head = config.vocab_size * config.hidden_size * item + logits
    return max(head, forward.tuning(), _prefill_forward(*shape).tuning())


def window_of(start: int, cache_length: int) -> int:
    """Rows of the cache that a forward from position ``start`` looks at (``oled_jax.decoding.programs.window_for``)."""
    window = SMALLEST_WINDOW
    while window < start:
        window *= 2
    return min(window, cache_length)


def _prefill_forward(config, item, context_length, batch, block_length, slots) -> _Forward:
    plan = ChunkPlan.of(config, block_length, batch)
    _, tokens = next(plan.chunks(context_length))
    cached = plan.cache_length(context_length)
    # Offloaded experts are swept one by one in prefill, whatever the slots.
    rows = config.num_experts if slots is None else 1
    return _Forward(config, item, batch, tokens, window_of(cached - plan.largest, cached), rows)


def _denoise_forward(config, item, context_length, batch, block_length, slots) -> _Forward:
    cached = ChunkPlan.of(config, block_length, batch).cache_length(context_length)
    window = window_of(cached - block_length, cached)
    return _Forward(config, item, batch, block_length, window, config.num_experts if slots is None else slots)
