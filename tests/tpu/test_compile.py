"""The programs of a run under a budget, compiled for a TPU v5e at LLaDA2.0-mini's full geometry, without a TPU.

What the compiler's own figures show: that the step compiles at all and fits a chip, whose memory libtpu enforces; that
slots and cache are updated in place; that the bank stays in host memory and is only sliced; and that the planner is
right. Nothing is run, so this says nothing about results or speed. It takes libtpu: ``make tpu-test``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oled_jax.offload.offloaded import FORMS
from oled_jax.planner import Plan, make_plan
from tests.tpu.compile_program import CONFIG, CONTEXT, DTYPE, EXPERTS, STAGING

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make tpu-test"),
]

CHECKOUT = Path(__file__).parents[2]
WARNING = "host compute"

# Metadata servers and other hosts are not asked. Without the first line libtpu would load in one process at a time, as
# if there were a chip to share. Warnings go to standard error; by default libtpu writes them to a file alone.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def compiled(kind: str, form: str, logs: Path) -> tuple[dict, str]:
    """Memory figures in bytes by program and name, and what went to standard error."""
    # Neither the flags of this test run nor anyone's compilation cache: what comes from there comes without warnings.
    others = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_", "XLA_", "LIBTPU"))
    }
    environment = others | ENVIRONMENT | {"TPU_LOG_DIR": str(logs)}
    command = [sys.executable, "-m", "tests.tpu.compile_program", kind, form]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.lower()


def planned(form: str) -> Plan:
    return make_plan(CONFIG, dtype=DTYPE, context_length=CONTEXT, experts_on_device=EXPERTS, staging=STAGING, form=form)


def held(plan: Plan) -> int:
    """Bytes that lie on the device between programs, by the planner's exact lines."""
    device = plan.device
    return device.weights + slots_of(plan) + device.kv_cache + device.block_state


def slots_of(plan: Plan) -> int:
    return plan.device.resident_slots + plan.device.staging_slots


def check(figures: dict, stderr: str, plan: Plan) -> None:
    """What holds for every program that reads the bank."""
    assert WARNING not in stderr
    assert figures["host_argument"] == plan.host.bank
    assert figures["host_temp"] == 0

    slots = slots_of(plan)
    assert figures["alias"] >= slots
    # Less than one layer's: no slots were copied, and certainly no bank.
    assert figures["temp"] < slots // plan.moe_layers < plan.host.bank // plan.moe_layers

    # The planner never plans for less than is used, so that what it lets pass fits, and for at most 5 % more, which is
    # what it promises of a whole device. It was 2 % to 3 % here: room for choosing kernels, which only a GPU does.
    used = held(plan) + figures["temp"] + figures["generated_code"] + figures["output"] - figures["alias"]
    assert used <= plan.device.total <= 1.05 * used


@pytest.mark.parametrize("form", FORMS)
def test_denoising_step(form, tmp_path):
    figures, stderr = compiled("denoise", form, tmp_path)
    plan, step = planned(form), figures["denoise"]
    check(step, stderr, plan)
    # A step takes everything that is on the device. Beyond the exact lines that is less than 0.1 %: maps, what the
    # policy remembers, and small arrays padded to whole tiles; the planner's reserve holds them.
    assert held(plan) <= step["argument"] < 1.001 * held(plan)
    # The block's own keys and values are updated in place as well, and the cache when they are committed.
    assert step["alias"] >= slots_of(plan) + plan.device.block_state
    assert figures["commit"]["alias"] >= plan.device.kv_cache


def test_prefill(tmp_path):
    figures, stderr = compiled("prefill", FORMS[0], tmp_path)
    plan, chunk = planned(FORMS[0]), figures["prefill"]
    check(chunk, stderr, plan)
    # The head is not taken, nor a block's state, nor the weights whose only use is the last layer's output.
    unused = plan.device.head + plan.device.block_state + plan.device.shared_experts // plan.moe_layers
    assert abs(chunk["argument"] + unused - held(plan)) < held(plan) // 1000
    assert chunk["alias"] >= slots_of(plan)


def test_computing_on_the_host_would_be_noticed(tmp_path):
    """The two signs whose absence is tested above are there when a load is done wrong."""
    figures, stderr = compiled("unclean", FORMS[0], tmp_path)
    assert WARNING in stderr
    assert figures["unclean"]["host_temp"] > 0
