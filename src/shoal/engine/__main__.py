"""``python -m shoal.engine``: an engine process, started and configured by its owner."""

import gc
import sys

# Of the hundreds of thousands of objects that importing makes none is garbage, and looking for it takes a
# tenth of the start.
gc.disable()

from shoal.engine.process.server import main  # noqa: E402

sys.exit(main())
