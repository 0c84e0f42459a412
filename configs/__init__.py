"""TOML presets, installed as ``oled_jax.configs``.

One file per released model, read by ``ModelConfig.from_preset``; in ``machines``, one per machine, read by
``oled_jax.lab.machine.read_machine``.
"""
