"""Starts a thread when it is imported, as some libraries do: what has imported it must not be forked."""

from __future__ import annotations

from helpers.processes.entries import start_a_thread

start_a_thread()
