"""``python -m trainwright.integration`` is the command line tool."""

import sys

from trainwright.integration.cli import main

if __name__ == "__main__":
    sys.exit(main())
