"""``python -m thunder_zero``: the command ``thunder-zero``."""

import sys

from thunder_zero.tools.cli import main

sys.exit(main())
