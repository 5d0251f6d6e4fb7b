"""Says which lock a thread of this process waits for, and which thread holds it, as far as Python can know."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import threading
from collections.abc import Mapping
from types import FrameType, MemberDescriptorType
from typing import Any

from nbdist.code_lines import users_lines
from nbdist.code_places import is_users
from nbdist.thread_frames import line_number, lines_of, outwards

_TAKES = re.compile(r"\bwith\s+(.+?)\s*:|([\w.\[\]'\"]+)\.acquire\(")
"""A line that takes a lock."""
_OWNER = re.compile(r"owner=(\d+)")
"""The ident of a thread in the text of an RLock; 0 if nobody holds it."""


def say_lock(thread: int, threads: Mapping[int, FrameType]) -> str:
    """Return the lock for which a thread waits, and its holder, in words: ``the lock `turn`, which … holds``."""
    # Empty if the thread's innermost line of user code takes no lock, or a free one. The holder is known of an RLock,
    # and of a lock that a ``with`` has taken.
    frame: FrameType | None = next((each for each in outwards(threads[thread]) if is_users(_file(each))), None)
    match = _TAKES.search(linecache.getline(_file(frame), line_number(frame))) if frame is not None else None
    if frame is None or match is None:
        return ""
    name = match[1] or match[2]
    lock = _value_of(name, frame)
    if lock is None or not _is_taken(lock, thread):
        return ""
    said = f"the lock `{name}`"
    owner = _OWNER.search(repr(lock))
    holder = int(owner[1]) if owner else next((each for each in threads if _holds(threads[each], lock, frame)), None)
    if holder is None:
        return said
    if holder == thread:
        return f"{said}, which it holds itself"
    names = {each.ident: each.name for each in threading.enumerate()}
    at = next((f" at {line.place}" for line in users_lines(lines_of(threads.get(holder)))), "")
    return f"{said}, which {names.get(holder, 'a thread that has ended')} holds{at}"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _value_of(text: str, frame: FrameType) -> Any:
    """Return the lock that ``self.turns[name]``, say, is in a frame, without running the user's code; or None."""
    try:
        value = _evaluate(ast.parse(text, mode="eval").body, frame)
    except (SyntaxError, AttributeError, LookupError, TypeError):  # no such expression, or it has no such part
        return None
    if isinstance(value, threading.Condition):
        value = vars(value)["_lock"]
    return value if isinstance(value, type(threading.Lock()) | type(threading.RLock())) else None


def _evaluate(node: ast.expr, frame: FrameType) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return frame.f_locals[name] if name in frame.f_locals else frame.f_globals[name]
        case ast.Attribute(value=owner, attr=name):
            held = _evaluate(owner, frame)
            value = inspect.getattr_static(held, name)
            is_slot = isinstance(value, MemberDescriptorType)
            return object.__getattribute__(held, name) if is_slot else value
        case ast.Subscript(value=owner, slice=key):
            kept, at = _evaluate(owner, frame), _evaluate(key, frame)
            is_plain = type(kept) in (dict, list, tuple) and type(at) in (str, int)  # else the user's code would run
            return kept[at] if is_plain else None
    return None


def _is_taken(lock: Any, thread: int) -> bool:
    """Return whether a thread that takes this lock has to wait."""
    if owner := _OWNER.search(repr(lock)):
        return int(owner[1]) not in (0, thread)
    return bool(lock.locked())


def _holds(innermost: FrameType, lock: Any, waiting: FrameType) -> bool:
    """Return whether a thread is inside of a ``with`` that has taken this lock; ``waiting`` is the frame that waits."""
    for frame in outwards(innermost):
        if is_users(_file(frame)):
            for begin, first, last, name in _blocks(_file(frame)):
                is_inside = first <= (line_number(frame)) <= last
                is_the_wait = frame is waiting and begin == line_number(frame)
                if is_inside and not is_the_wait and _value_of(name, frame) is lock:
                    return True
    return False


@functools.lru_cache(maxsize=32)
def _blocks(file: str) -> list[tuple[int, int, int, str]]:
    """Return each ``with NAME:`` of a file: its line, the first and last lines of its block, and the name."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a cell with a magic or `!`
        return []
    return [
        (each.lineno, each.body[0].lineno, each.end_lineno or each.lineno, ast.unparse(item.context_expr))
        for each in ast.walk(tree)
        if isinstance(each, ast.With)
        for item in each.items
    ]
