"""``python -m driftwatch``."""

from driftwatch.cli import main

main()
