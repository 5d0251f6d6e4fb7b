"""`Reader`: the parser of one magic's line."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import NoReturn

from nbdist.errors import UsageError


class Reader(argparse.ArgumentParser):
    """Parses the line of one magic, whose syntax is ``usage``. Options must be written in full.

    Each of ``flags`` has the spellings of one option without a value, such as ``-a --noblock``.
    """

    def __init__(self, usage: str, *flags: str) -> None:
        super().__init__(prog=usage.split()[0], usage=usage, add_help=False, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\d")  # a word such as -1,0 is a target, not an option
        for flag in flags:
            self.add_argument(*flag.split(), action="store_true")

    @property
    def options(self) -> list[str]:
        """All options for users, short and long."""
        # Options only for programs that were written for nbdistributed are hidden: their help is `argparse.SUPPRESS`.
        return [option for action in self._actions if action.help is None for option in action.option_strings]

    @property
    def takes_targets(self) -> bool:
        """Return whether the line may name workers."""
        return any(action.dest == "targets" and action.help is None for action in self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message and the syntax. argparse calls this for a wrong line."""
        # argparse's own method ends the process.
        raise UsageError(f"{message}; write: {self.usage}")

    def read(self, line: str) -> argparse.Namespace:
        """Return the options of a line, whose words are separated as in a shell. Raises UsageError if it is wrong."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{line.strip()!r}: {error}; write: {self.usage}") from None
        return self.parse_args(words)
