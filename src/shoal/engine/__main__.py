"""``python -m shoal.engine``: an engine process, started and configured by its owner."""

import gc
import sys

# Importing creates hundreds of thousands of objects, none of them garbage; collecting would take a tenth of
# the start.
gc.disable()

from shoal.engine.process.server import main  # noqa: E402

sys.exit(main())
