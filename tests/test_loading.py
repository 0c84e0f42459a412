"""Filling final arrays: both ways give the same arrays, converting on the way, whatever the order of rows."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from oled_jax.checkpoint.layout import DTYPES, Target
from oled_jax.loading import DeviceFill, HostFill
from tests.golden_fixtures import GOLDEN


@pytest.mark.parametrize("fill", [HostFill, DeviceFill])
@pytest.mark.parametrize("stored", list(DTYPES))
@pytest.mark.parametrize("wanted", list(DTYPES))
def test_rows_arrive_in_any_order_and_in_the_wanted_dtype(fill, stored, wanted):
    values = np.random.default_rng(0).standard_normal((10, 3, 5)).astype(DTYPES[stored])
    filling = fill(Target("x", values.shape, DTYPES[wanted]))
    for start, rows in ((4, 4), (8, 2), (0, 4)):
        filling.place(values[start : start + rows], start)
    out = filling.finish()
    assert isinstance(out, jax.Array)
    assert out.dtype == DTYPES[wanted]
    np.testing.assert_array_equal(np.asarray(out), values.astype(DTYPES[wanted]))


def test_the_cpu_backend_adopts_the_buffer():
    """Otherwise loading would hold every array twice."""
    filling = HostFill(Target("x", (1000, 7), DTYPES["bfloat16"]))
    buffer = filling._buffer
    buffer[:] = 0
    assert filling.finish().unsafe_buffer_pointer() == buffer.ctypes.data


def test_a_backend_that_is_absent_is_one_clear_error():
    code = "from oled_jax.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    arguments = ["generate", "--model", str(GOLDEN / "llada2-tiny-f32"), "--prompt-ids", "1", "--mask-id", "319"]
    environment = {**os.environ, "JAX_PLATFORMS": "rocm"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "JAX cannot start a backend (JAX_PLATFORMS='rocm')" in done.stderr
    assert "Traceback" not in done.stderr
