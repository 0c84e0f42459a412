"""Importing the package starts nothing, changes nothing, and costs nothing that is not used."""

import subprocess
import sys
import textwrap


def run(code: str) -> str:
    """Runs ``code`` in a fresh interpreter with every warning an error; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light_and_without_side_effects():
    run("""
        import os, sys, threading
        environment, threads = dict(os.environ), threading.active_count()
        import oled_jax
        assert dict(os.environ) == environment
        assert threading.active_count() == threads
        heavy = {"jax", "jaxlib", "flax", "numpy", "ml_dtypes", "orbax", "transformers", "safetensors", "optax"}
        loaded = heavy & set(sys.modules)
        assert not loaded, f"import oled_jax imports {sorted(loaded)}"
        assert oled_jax.__version__
    """)


def test_every_exported_name_resolves_and_starts_no_backend():
    out = run("""
        import os
        environment = dict(os.environ)
        import warnings
        warnings.simplefilter("ignore")  # third parties warn on import; what they say is not ours
        import oled_jax
        names = oled_jax.__all__
        for name in names:
            assert getattr(oled_jax, name) is not None, name
        assert {k: v for k, v in os.environ.items() if k in environment} == environment
        assert not any("XLA" in k or "JAX" in k for k in os.environ.keys() - environment.keys())
        # A platform can be chosen until the first backend starts, and not after: this asks which it is.
        import jax
        jax.config.update("jax_platforms", "no_such_platform")
        try:
            jax.devices()
        except RuntimeError as error:
            assert "no_such_platform" in str(error), error
        else:
            raise AssertionError("importing oled_jax had started a JAX backend")
        print(*names)
    """)
    assert {"Engine", "Threshold", "Editing", "Levenshtein"} <= set(out.split())


def test_an_unknown_name_is_an_attribute_error():
    run("""
        import oled_jax
        try:
            oled_jax.no_such_name
        except AttributeError as error:
            assert "no_such_name" in str(error)
        else:
            raise AssertionError("no AttributeError")
    """)
