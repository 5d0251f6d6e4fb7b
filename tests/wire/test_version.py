"""`VERSION` is raised with every change of what messages hold: agents of two versions refuse each other by it."""

import enum
import hashlib
import inspect

import msgspec

from nbdist.autograd.graph import messages as pass_messages
from nbdist.wire import messages

PINNED = (18, "b0ab273778216e40")
"""`VERSION`, and the digest of the fields that belong to it."""


def fields():
    """Each message's number and fields, with their types and how many have a default; each enumeration's members.

    Of calls, and of contexts and passes.
    """
    for name, found in [*sorted(vars(messages).items()), *sorted(vars(pass_messages).items())]:
        if not isinstance(found, type) or found.__module__ not in (messages.__name__, pass_messages.__name__):
            continue
        if issubclass(found, msgspec.Struct):
            kinds: dict[str, str] = {}
            for base in reversed(found.__mro__):
                kinds |= inspect.get_annotations(base)
            each = [(field, kinds[field]) for field in found.__struct_fields__]
            yield name, found.__struct_config__.tag, each, len(found.__struct_defaults__)
        elif issubclass(found, enum.Enum):
            yield name, [(member.name, member.value) for member in found]


def test_the_version_was_raised_with_the_last_change_of_a_message():
    digest = hashlib.sha256(repr(list(fields())).encode()).hexdigest()[:16]
    version = max(messages.VERSION, PINNED[0] + 1)
    assert (messages.VERSION, digest) == PINNED, (
        f"VERSION, or what messages hold, is not as pinned: write VERSION = {version} in nbdist/wire/messages.py, "
        f"and PINNED = {(version, digest)} here"
    )
