"""``python -m shoal.engine``: an engine process, started and configured by its owner."""

import sys

from shoal.engine.process import main

sys.exit(main())
