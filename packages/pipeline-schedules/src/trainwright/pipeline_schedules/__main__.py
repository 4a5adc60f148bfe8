"""``python -m trainwright.pipeline_schedules``; see ``--help``."""

from __future__ import annotations

import sys

from trainwright.pipeline_schedules.command import main

sys.exit(main(sys.argv[1:]))
