"""Several ``__main__`` modules in one process, so that the two ends of a message can have one each."""

import contextlib
import sys
import textwrap
import types
import weakref
from itertools import count

import cloudpickle.cloudpickle as cloudpickle

from nbdist import MissingDefinition
from nbdist.wire import codec
from nbdist.wire.pickling import definitions

_numbers = count()


class Main:
    """What one process calls ``__main__``, with whatever cloudpickle remembers there."""

    def __init__(self, source=""):
        self.module = types.ModuleType("__main__")
        self._by_class, self._by_id = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary()
        self.cell(source)

    def cell(self, source):
        """Run a cell; the module, for looking things up."""
        source = textwrap.dedent(source)
        with self.active():
            exec(compile(source, f"<cell {next(_numbers)}>", "exec"), self.module.__dict__)
        return self.module

    def __getattr__(self, name):
        return getattr(self.module, name)

    @contextlib.contextmanager
    def active(self):
        """Make this the process's ``__main__`` for a while."""
        before = sys.modules["__main__"]
        trackers = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
        sys.modules["__main__"] = self.module
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS = self._by_class
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = self._by_id
        try:
            yield self
        finally:
            sys.modules["__main__"] = before
            cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = trackers

    def digest(self, name):
        with self.active():
            return definitions.digest(definitions.find_named(name))


def send(value, sender, receiver):
    """`value` as it arrives, and whether it took a second message with the definitions in it."""
    with sender.active():
        encoded = codec.encode(value)
    try:
        with receiver.active():
            return codec.decode(encoded.payload, encoded.frames), False
    except MissingDefinition:
        with sender.active():
            encoded = codec.encode(value, by_value=True)
        with receiver.active():
            return codec.decode(encoded.payload, encoded.frames), True


def run(receiver, function, *args):
    """Call `function` in the receiver's process."""
    with receiver.active():
        return function(*args)


FUNCTIONS = """
import functools

def plain(x):
    return x + 1

def default(x, y=1):
    return x + y

def keyword(x, *, y=1):
    return x + y

def by(n):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(x) + n
        return wrapper
    return decorate

@by(1)
def decorated(x):
    return x
"""
"""What both sides define: functions that all return 1 for 0."""

CHANGES = {
    "defined anew": ("plain", "def plain(x): return x + 2"),
    "other code": ("plain", "plain.__code__ = (lambda x: x + 2).__code__"),
    "other defaults": ("default", "default.__defaults__ = (2,)"),
    "defaults where the earlier ones were": ("default", "default.__defaults__ = None\ndefault.__defaults__ = (2,)"),
    "another keyword default": ("keyword", "keyword.__kwdefaults__['y'] = 2"),
    "decorated otherwise": ("decorated", "@by(2)\ndef decorated(x): return x"),
    "another decorator": (
        "decorated",
        "by = lambda n: lambda g: functools.wraps(g)(lambda x: 2)\n@by(1)\ndef decorated(x): 0",
    ),
    "another variable of the closure": (
        "decorated",
        "decorated.__closure__[decorated.__code__.co_freevars.index('n')].cell_contents = 2",
    ),
    "other code in what it decorates": ("decorated", "decorated.__wrapped__.__code__ = (lambda x: x + 1).__code__"),
}
"""Functions, and how one side changes them: from then on they return 2 for 0."""
