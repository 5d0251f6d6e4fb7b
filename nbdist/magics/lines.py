"""Parses the lines of magics into options. Pure. A wrong line raises UsageError, which says how to write it.

Targets and expressions are returned as they are written: the cluster checks targets, a worker expressions.

A function that reads the text of one option raises argparse's ArgumentTypeError if the text is wrong; `Reader` makes
the UsageError of it.
"""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from nbdist.cluster.spec import DEFAULT_INVITATION, OPTIONS, VALID_FOR, Spec
from nbdist.cluster.spec import usage as options_usage
from nbdist.durations import LONGEST
from nbdist.errors import UsageError
from nbdist.magics.reader import Reader
from nbdist.rpc.options import Device, RpcBackendOptions

READERS: dict[str, Reader] = {}
"""The parser for the line of each magic, by the magic's name with its percent signs."""


def _reader(usage: str, *flags: str) -> Reader:
    # The name ends before a space, or before the bracket of %%rank[0,1].
    reader = READERS[re.split(r"[ \[]", usage)[0]] = Reader(usage, *flags)
    return reader


def read(magic: str, line: str) -> argparse.Namespace:
    """Return the options in the line of a magic, by name. ``targets``, if it has this, is one text, or None."""
    found = READERS[magic].read(line)
    if hasattr(found, "targets"):
        found.targets = " ".join(found.targets or ()).strip() or None  # with spaces, so that `1 2` does not become 12
    return found


def _this_host(text: str) -> str:
    if text not in ("localhost", "127.0.0.1"):
        raise argparse.ArgumentTypeError(f"workers are started on this host only, not at {text!r}")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= LONGEST:  # NaN fails both comparisons
        raise argparse.ArgumentTypeError(
            f"the time must be more than 0 s, and at most {LONGEST:.0f}, not {text.strip()}"
        )
    return value


def _seconds_or_0(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _seconds(text)


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"needs the name of a variable, not {text!r}")
    return text


# -- %remote ------------------------------------------------------------------------------------

# The option may also stand after the target, because no expression begins with -t and a number.
_VALUE = re.compile(
    r"\s*(?:(?:-t|--timeout)(?:\s+|=)(?P<before>\S+)\s+)?"
    r"(?P<targets>(?:\[[^\]]*\]|,\s*|[^\s\[,])+)\s+"
    r"(?:(?:-t|--timeout)(?:\s+|=)(?P<after>[\d.]+)\s+)?"
    r"(?P<expression>.*\S)\s*",
    re.DOTALL,
)
_VALUE_USAGE = "write: %remote [-t SECONDS] TARGET expression, for instance: %remote worker1 x.shape"


def parse_value(line: str) -> tuple[str, str, float | None]:
    """Parse the line of ``%remote``; return the target, the expression and the time limit."""
    if (match := _VALUE.fullmatch(line)) is None:
        raise UsageError(
            f"%remote needs a target and an expression; {_VALUE_USAGE}; a cell for workers begins with %%remote"
        )
    targets, seconds = match["targets"], match["before"] or match["after"]
    if re.match(r"-\D", targets):  # an option that %remote lacks; -1 is a target
        raise UsageError(f"{targets!r} is not a target; {_VALUE_USAGE}")
    try:
        timeout = _seconds(seconds) if seconds is not None else None
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"-t: {error}; {_VALUE_USAGE}") from None
    return targets, match["expression"], timeout


# -- %dist_init ---------------------------------------------------------------------------------


def _ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of ports such as 40000-40100")
    return int(first), int(last)


def _device_map(text: str) -> tuple[str, dict[str, str]]:
    """Return the receiver in a text such as ``worker1:0=1,cpu=cuda:0``, and its device for each device of a sender."""
    name, _, pairs = text.partition(":")
    devices = {}
    for pair in pairs.split(","):
        ours, _, theirs = map(_device, pair.partition("="))
        # Refuses a pair such as 0=1=2, too, and a device of the sender that is named twice.
        if not (name and ours and theirs) or "=" in theirs or ours in devices:
            raise argparse.ArgumentTypeError(f"{text!r} is not a device map such as worker1:0=1,1=0")
        devices[ours] = theirs
    return name, devices


def _device(text: str) -> str:
    text = text.strip()
    return f"cuda:{text}" if text.isdecimal() else text  # a number stands for a GPU


def _with_maps(maps: Sequence[tuple[str, Mapping[Device, Device]]]) -> RpcBackendOptions:
    options = RpcBackendOptions()
    for name, device_map in maps:
        try:
            options.set_device_map(name, device_map)
        except RuntimeError as error:
            raise UsageError(f"--device-map {name}: {str(error).splitlines()[0]}") from None
    return options


def parse_init(line: str) -> Spec:
    """Parse the line of ``%dist_init``, and check the values: see `Spec.check`. Nothing is started."""
    found = read("%dist_init", line)
    if found.bare:
        bare = " ".join(found.bare)
        # The most likely slip: a number of workers without -n.
        meant = f": `%dist_init -n {bare}` starts {bare} workers" if bare.isdecimal() and int(bare) else ""
        raise UsageError(f"%dist_init takes options only, not {bare!r}{meant}; write: {READERS['%dist_init'].usage}")
    given = {name: value for name, value in vars(found).items() if value is not None}
    if found.gpu_ids is not None:
        given["gpu_ids"] = _numbers(" ".join(found.gpu_ids))
    return Spec.of({**given, "n": found.count, "rpc": _with_maps(found.device_map)})


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,9}\s*", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is not a whole number from 1 to 999999999")
    return int(text)


def _line_span(text: str) -> tuple[int | None, int | None]:
    """Return the first and the last line of ``FIRST:LAST``, a `nbdist.views.workers.printed.LineRange`.

    Without FIRST the first line is 1; without LAST the last one is None. A number N without a colon returns
    ``(None, N)``: the last N lines.
    """
    first, colon, last = text.partition(":")
    if not colon:
        return None, _whole_number(first)
    return _whole_number(first) if first.strip() else 1, _whole_number(last) if last.strip() else None


def parse_diff(line: str, magic: str = "%dist_diff") -> tuple[str, str | None]:
    """Parse the line of ``%dist_diff``, or of a ``magic`` like it; return expression (or ``--code``) and target."""
    # Not by a `Reader`: the quotes in an expression are Python's, and not a shell's.
    found = re.fullmatch(r"(.*?)(?:\s(?:-r|--rank|--targets)[\s=]+(.+))?", line.strip())
    if found is None or not found[1].strip():
        raise UsageError(f"{magic} needs an expression to compare; write: {READERS[magic].usage}")
    return found[1].strip(), found[2]


def parse_break(line: str) -> argparse.Namespace:
    """Parse the line of ``%dist_break``, whose condition, an expression of Python, stands last."""
    head, _, condition = f" {line}".partition(" --if ")
    found = read("%dist_break", head)
    found.condition = condition.strip()
    if (found.place is None and (found.condition or found.targets)) or (found.place and found.delete is not None):
        raise UsageError(f"write: {READERS['%dist_break'].usage}")
    return found


def parse_compare(line: str) -> tuple[str, str | None, bool]:
    """Parse the line of ``%dist_compare``; return the expression, the target, and whether each bit counts."""
    rest = re.sub(r"(^|\s)--exact(?=\s|$)", "", line.rstrip())
    return *parse_diff(rest, "%dist_compare"), rest != line.rstrip()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``0,1``; brackets and spaces are allowed."""
    match = re.fullmatch(r"\s*(\[)?([-\d,\s]*)(?(1)\])\s*", text)
    try:
        return tuple(int(part) for part in re.split(r"\s*,\s*|\s+", match[2].strip() if match else ""))
    except ValueError:
        usage = READERS["%dist_init"].usage
        raise UsageError(f"-g: {text.strip()!r} is not a list of numbers such as 0,1; write: {usage}") from None


# -- the parsers --------------------------------------------------------------------------------

_CELL = "[-a] [-o NAME] [-t SECONDS] [--group-outputs] [--fail-fast] [--progress-after SECONDS] [--local]"

for _magic in ("%%remote [TARGET]", "%%distributed", "%%rank[0,1]"):
    _cell = _reader(f"{_magic} {_CELL}", "-a --noblock", "--group-outputs", "--fail-fast", "--local")
    _cell.add_argument("targets", nargs="*", help=argparse.SUPPRESS if _magic == "%%distributed" else None)
    _cell.add_argument("-o", "--out", type=_variable)
    _cell.add_argument("-t", "--timeout", type=_seconds)
    _cell.add_argument("--progress-after", type=_seconds_or_0, default=10.0)

# The arguments of argparse for an option of a cluster, by the type of the field of `Spec`. A ``float`` is a time in
# seconds, a ``float | None`` any number.
_READ: dict[str, dict[str, Any]] = {
    "int": {"type": int},
    "float": {"type": _seconds},
    "float | None": {"type": float},
    "int | None": {"type": int},
    "str": {},
    "str | None": {},
    "bool": {"action": "store_true"},
    "tuple[int, ...] | None": {"nargs": "+"},
    "tuple[int, int] | None": {"type": _ports},
    "tuple[str, ...]": {"type": lambda text: tuple(name.strip() for name in text.split(",") if name.strip())},
}

_init = _reader(f"%dist_init {options_usage()} [--device-map WORKER:0=1,1=0]")
_init.add_argument("bare", nargs="*")
for _field in fields(Spec):
    if (_option := OPTIONS.get(_field.name)) is not None:
        _choices: dict[str, Any] = {"choices": _option.known_values} if _option.is_closed else {}
        _init.add_argument(*_option.flags, dest=_field.name, **_READ[str(_field.type)], **_choices)
_init.add_argument("--device-map", action="append", type=_device_map, default=[])
_init.add_argument("-a", "--master-addr", type=_this_host, help=argparse.SUPPRESS)  # nbdistributed has this option

_watch = _reader("%%watch [--paused] [-a] [-o NAME] [--no-norms]", "--paused", "-a --noblock", "--no-norms")
_watch.add_argument("-o", "--out", type=_variable)

_log = _reader("%dist_log [TARGET] [--cell NUMBER] [--lines FIRST:LAST] [--save FILE]")
_log.add_argument("targets", nargs="*")
_log.add_argument("--cell", type=_whole_number)
_log.add_argument("--lines", type=_line_span)
_log.add_argument("--save")

_reader("%dist_memory [TARGET] [-v | --all]", "-v --all").add_argument("targets", nargs="*")
_reader("%dist_stacks [TARGET]").add_argument("targets", nargs="*")
_debug = _reader("%dist_debug [TARGET] | --lab WORKER | --lab off")
_debug.add_argument("targets", nargs="*")
_debug.add_argument("--lab")
_reader("%dist_restart [TARGET] [-p]", "-p --process-group").add_argument("targets", nargs="*")
_reader("%dist_doctor [-t SECONDS]").add_argument("-t", "--timeout", type=_seconds, default=60.0)
# nbdistributed has the option -n of %dist_reset; it is ignored.
_reader("%dist_reset").add_argument("-n", "--nuclear", action="store_true", help=argparse.SUPPRESS)
_reader("%%timeline [FILE]").add_argument("file", nargs="?")

_invite = _reader("%dist_invite [FILE] [--uses N] [--expires SECONDS] | --revoke", "--revoke")
_invite.add_argument("file", nargs="?", default=DEFAULT_INVITATION)
_invite.add_argument("--uses", type=int, default=1)
_invite.add_argument("--expires", type=float, default=VALID_FOR)

_mode = _reader("%dist_mode [-e | -d]").add_mutually_exclusive_group()
_mode.add_argument("-e", "--enable", action="store_true")
_mode.add_argument("-d", "--disable", action="store_true")

for _magic in ("%dist_push NAME [NAME ...]", "%dist_pull NAME [NAME ...]", "%dist_diff EXPRESSION | --code"):
    _values = _reader(f"{_magic} [-r TARGET]", *(["--code"] if "--code" in _magic else []))
    _values.add_argument("names", nargs="+")
    _values.add_argument("-r", "--rank", "--targets", dest="targets", nargs="+")

_reload = _reader("%dist_reload MODULE [-r TARGET]")
_reload.add_argument("module")
_reload.add_argument("-r", "--rank", "--targets", dest="targets", nargs="+")

_break = _reader("%dist_break [FILE:LINE | FUNCTION] [-r TARGET] [--if EXPRESSION] | -d [NUMBER]")
_break.add_argument("place", nargs="?")
_break.add_argument("-r", "--rank", "--targets", dest="targets", nargs="+")
_break.add_argument("--if", dest="condition", default="")
_break.add_argument("-d", "--delete", type=_whole_number, nargs="?", const=0)

_compare = _reader("%dist_compare EXPRESSION [-r TARGET] [--exact]", "--exact")
_compare.add_argument("-r", "--rank", "--targets", dest="targets", nargs="+")

# For completion: parse_value reads the line, as parse_diff does.
_value = _reader("%remote [-t SECONDS] TARGET expression")
_value.add_argument("-t", "--timeout")
_value.add_argument("targets")

for _magic in ("%dist", "%dist_shutdown", "%dist_status", "%dist_panel", "%dist_free", "%sync"):
    _reader(_magic)
