"""``python -m oled_jax.convert`` is ``oled-convert``."""

import sys

from oled_jax.convert.cli import main

sys.exit(main())
