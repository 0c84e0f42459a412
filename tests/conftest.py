"""What all tests share: the platform, the order, interrupts, and hypothesis without deadlines."""

import os
import signal

import hypothesis
import pytest

# A busy machine is no failure, and a test that fails once must fail again.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--accelerator",
        action="store_true",
        help="run on the default JAX backend, with the tests marked gpu; without it everything runs on the CPU",
    )


def pytest_configure(config):
    # By environment and before jax is imported, so that subprocesses started by tests run on the same platform.
    if not config.getoption("--accelerator"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Tests compile much and run little: without LLVM's optimisation they take two thirds of the time of level 1.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # A run started in the background ignores SIGINT, and every command that a test interrupts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--accelerator"):
        skip = pytest.mark.skip(reason="needs an accelerator: run with --accelerator")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
