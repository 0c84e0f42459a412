"""What the engine counted while it generated is what a replay of its trace counts, forward by forward."""

import dataclasses
import json

import numpy as np
import pytest

from oled_jax.lab import Stream, TraceWriter, read_trace, replay
from oled_jax.lab.stream import Tokens
from oled_jax.lab.trace import PADDING
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, MODES, STREAM
from oled_jax.retention import policy_by_name
from oled_jax.retention.record import JUST_COMMITTED, MASKED, PREFILL
from tests.golden_fixtures import cases, offloaded_engine, rule_of
from tests.offload.test_engine import EXPERTS, NAME, POLICIES, generated, known_before

# Every kind of policy, forms by turns, three capacities.
CASES = [
    (policy_by_name("lru"), 3, LOAD_THEN_COMPUTE),
    (policy_by_name("lru"), 6, STREAM),
    (policy_by_name("oled:w=one,rho_in=0.9"), 6, LOAD_THEN_COMPUTE),
    (policy_by_name("status"), 9, STREAM),
    (POLICIES[-1], 6, LOAD_THEN_COMPUTE),
    (POLICIES[6], 9, LOAD_THEN_COMPUTE),
    (policy_by_name("random:seed=7"), 6, STREAM),
    (policy_by_name("lfuda:tie=load"), 6, LOAD_THEN_COMPUTE),
]


def three(engine, on_record):
    """Three sequences, which makes a batch of four rows; the prompt of one has no full block."""
    rule = dataclasses.replace(rule_of(*cases(NAME)[0][::2]), block_length=8, steps=8, threshold=0.9)
    lengths = (5, 30, 17)
    prompts = [[7 * index + 3 for index in range(length)] for length in lengths]
    return engine.generate_batch(prompts, rule, gen_length=16, on_record=on_record)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "capacity", "form"), CASES, ids=lambda value: getattr(value, "label", value))
def test_counters_of_a_replay_equal_the_engines(policy, capacity, form, tmp_path):
    engine = offloaded_engine(NAME, capacity, policy, form)
    records, writer = [], TraceWriter(EXPERTS)

    def listen(record):
        records.append(record)
        writer.add(record)

    # The second run starts from warm slots; its batch is larger where a policy keeps something for every sequence.
    again = three if policy.reads_tokens else generated
    runs = [run(engine, on_record=listen)[0].metrics.experts for run in (generated, again)]
    writer.write(tmp_path / "run.safetensors.gz")
    stream = Stream(read_trace(tmp_path / "run.safetensors.gz"), include_prefill=True)
    result = replay(stream, dataclasses.replace(policy, mode=MODES[form]), capacity)

    assert len(records) == len(stream)
    for record, forward in zip(records, stream.forwards, strict=True):
        wanted = record.counts > 0
        np.testing.assert_array_equal(stream.counts[forward.index], record.counts)
        np.testing.assert_array_equal(result.traffic.hits[forward.index], (wanted & record.resident).sum(1))
        np.testing.assert_array_equal(result.traffic.occupied[forward.index], record.resident.sum(1))
    assert [tuple(np.flatnonzero(layer)) for layer in result.resident] == list(runs[-1].resident)
    for phase in ("prefill", "decode"):
        ours, theirs = getattr(result, phase), [getattr(run, phase) for run in runs]
        assert ours.forwards == sum(each.forwards for each in theirs) > 0
        for name in ("requests", "hits", "misses", "loads", "token_requests", "token_hits"):
            expected = tuple(map(sum, zip(*(getattr(each, name) for each in theirs), strict=True)))
            assert getattr(ours, name) == expected, (phase, name)
    assert json.loads(json.dumps(result.to_json(None)))["prefill"]["forwards"] > 0


@pytest.mark.slow
def test_tokens_are_known_as_the_engine_knew_them():
    engine = offloaded_engine(NAME, 6, policy_by_name("lru"), LOAD_THEN_COMPUTE)
    records, writer = [], TraceWriter(EXPERTS)

    def listen(record):
        records.append(record)
        writer.add(record)

    generated(engine, on_record=listen)
    trace = writer.trace()
    tokens, compared = Tokens(trace), 0
    for record, previous, forward in zip(
        records, [None, *records[:-1]], Stream(trace, include_prefill=True).forwards, strict=True
    ):
        before, after = tokens.next(forward)
        counted, ours = (record.routing.ids[0, :, 0] >= 0), (before.ids[0, :, 0] >= 0)
        for found, expected in ((before, known_before(record, previous)), (after, record.routing)):
            for name in ("row", "confidence", "status", "tokens"):
                np.testing.assert_array_equal(getattr(found, name)[ours], getattr(expected, name)[counted], name)
            for name in ("ids", "weights"):
                np.testing.assert_array_equal(getattr(found, name)[:, ours], getattr(expected, name)[:, counted], name)
        compared += int(ours.sum())
    assert compared > 100
    # What a forward proposed is what it wrote, where it wrote; prefill proposes nothing.
    decodes, written = trace.phase > PREFILL, trace.status == JUST_COMMITTED
    proposed = trace.candidates >= 0
    np.testing.assert_array_equal(proposed, decodes[:, None] & (trace.expert_ids[:, 0, :, 0] != PADDING))
    np.testing.assert_array_equal(trace.candidates[written], trace.tokens[written])
    waiting = decodes[:, None] & (trace.status == MASKED)
    assert written.any() and waiting.any() and (trace.candidates[waiting] != trace.tokens[waiting]).any()
