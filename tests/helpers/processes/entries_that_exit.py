"""Ends, as a program does that was meant to be run and not imported."""

import sys

sys.exit(3)
