"""`python -m kvpilot_engine`: the same as the `kvpilot-engine` command."""

import sys

from kvpilot_engine.cli import main

if __name__ == "__main__":  # the engine child imports this module again by another name
    sys.exit(main())
