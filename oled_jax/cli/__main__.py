"""``python -m oled_jax.cli`` is ``oled-jax``."""

import sys

from oled_jax.cli import main

sys.exit(main())
