"""``python -m v100_operator``."""

import sys

from .cli import main

sys.exit(main())
