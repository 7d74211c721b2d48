"""`python -m kvpilot_tools.cluster`: the same as the console script."""

import sys

from kvpilot_tools.cluster.cli import main

sys.exit(main())
