"""Ends the process that imports it, as a crash in native code would."""

import os

os._exit(3)
