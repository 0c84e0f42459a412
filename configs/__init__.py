"""TOML presets, installed as ``oled_jax.configs``: one file per released model, read by ``ModelConfig.from_preset``."""
