"""``python -m megappo``: the same as the ``megappo`` command."""

import sys

from megappo.cli import main

sys.exit(main())
