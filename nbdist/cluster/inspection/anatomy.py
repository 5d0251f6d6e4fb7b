"""Says what a value consists of, and where in it an object is: "element 3 of list losses (40 elements)".

Nothing here calls code of the values' classes. Call it inside of `torch_private.no_torch_function`. The instance dict
of an object may begin to exist when it is read, which takes the object some hundred bytes.
"""

from __future__ import annotations

import collections
import contextlib
from itertools import islice
from types import CellType, FunctionType, GetSetDescriptorType
from typing import Any

import torch

from nbdist.amounts import counted
from nbdist.code_lines import CodeLine
from nbdist.rpc.references import inert
from nbdist.rpc.references.describing import dtype_name

CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, collections.deque)
_PLAIN: tuple[Any, ...] = (*CONTAINERS, collections.OrderedDict, collections.defaultdict)
_REGISTRIES = ("_parameters", "_buffers", "_modules")  # dicts of a module whose items are attributes for its user
MOST_STEPS = 30  # of a path that is described
_LETTERS_SHOWN = 60  # of an expression such as ``model.layers[3]``, whose middle is left out
_MOST_ELEMENTS = 1_000  # of a container that are looked at
_KINDS_SHOWN = 4  # of these

Step = tuple[Any, int, Any, Any]
"""A step of a path: the holder, the place of the next object among all that a `CensusWalk` finds in the holder, the
object found before it (its key, if the holder is a dict), and the object."""


def describe_path(name: str, steps: list[Step]) -> str:
    """Return in words where these steps lead from the variable ``name``; "" without a name, or for none or too many."""
    told, at, around = "", name, ""
    owner: Any = None  # the object to which the next holder belongs as its instance dict, registry, closure or defaults
    for holder, number, before, value in steps if name and len(steps) <= MOST_STEPS else ():
        of = owner if owner is not None else holder
        if type(holder) is FunctionType:
            code, owner = holder.__code__, holder
            place = CodeLine(code.co_filename, code.co_firstlineno, "").place
            told = f"a {'default argument' if number else 'closure'} of {code.co_name} ({place})"
            told += f", in {name}" if code.co_name != name else ""
            around = f", in {told}"
        elif type(owner) is FunctionType:
            at, owner = owner.__code__.co_freevars[number] if holder is owner.__closure__ else "", None
        elif is_part(of, value):
            owner = of
        elif type(holder) is not CellType and (at or _base_of(holder) is not None):
            told, inner = _describe_step(of, holder, number, before, value, at)
            told, owner = told + around, None
            around = around if inner else f", {told}"
            at = inner if at else ""  # behind an object without a name, there are no expressions any more
    return told


def is_part(holder: Any, value: Any) -> bool:
    """Return whether a path passes by this value: cells, an instance dict, or the dict of a module's parameters."""
    fields = _fields(holder) if type(value) is dict else {}
    kept = [fields, *(dict.get(fields, name) for name in _REGISTRIES if inert.is_a(holder, torch.nn.Module))]
    return type(holder) is FunctionType or type(value) is CellType or any(value is each for each in kept)


def _fields(value: Any) -> dict[str, Any]:
    """Return the instance dict of an object, or the attributes of a class; empty if the object has none."""
    found = (inert.dict_of_class(cls).get("__dict__") for cls in inert.mro(type(value)))
    fields: Any = next((each.__get__(value) for each in found if type(each) is GetSetDescriptorType), {})
    return fields if inert.is_a(fields, dict) else dict(fields)


def _describe_step(of: Any, holder: Any, number: int, before: Any, value: Any, at: str) -> tuple[str, str]:
    """Return where a step leads from the object ``at``, in words and as an expression, "" if there is none."""
    # `of` is the holder itself, or the object whose attributes the holder has.
    at = at if len(at) <= _LETTERS_SHOWN else f"{at[:20]}…{at[-30:]}"
    base, told = _base_of(holder), f"{short_name(type(of))} {at}".strip()
    name = before if holder is not of else None
    if not is_plain(type(holder)):
        name = next((name for name, each in list(dict.items(_fields(holder))) if each is value), None)
    if type(name) is str:
        return f"attribute {name} of {told}", f"{at}.{name}"
    if base is None:
        in_graph = inert.is_a(holder, torch.Tensor) and inert.tensor_fact(holder, "grad_fn") is not None
        return f"in {'the graph of ' if in_graph else ''}{at}", ""
    word, key = "element", str(number) if is_plain(type(holder)) and base not in (set, frozenset) else ""
    if base is dict:
        has_key = is_plain(type(holder)) and number % 2 and (type(before) is str or type(before) is int)
        word, key = "item", repr(before)[:_LETTERS_SHOWN] if has_key else ""
    one = f"{word} {key}" if key else f"an {word}"
    return f"{one} of {told} ({counted(base.__len__(holder), word)})", f"{at}[{key or '…'}]"


def contents_of(value: Any, nodes: int = 0) -> str:
    """Return what a value holds, to be written behind its type, such as " of 12: 8 Tensor, 4 int"; a number itself."""
    # ``nodes`` is the number of graph nodes that the value leads to, if they were counted.
    told, graphs, base = "", " with graphs" if nodes else "", _base_of(value)
    if inert.is_a(value, torch.Tensor) and inert.tensor_fact(value, "grad_fn") is not None:
        graphs = " with its graph"
    elif any(type(value) is cls for cls in (int, float, bool)) and inert.size_of(value) < _LETTERS_SHOWN:
        return f" {value!r}"
    elif base is not None:
        kinds: collections.Counter[tuple[str, str]] = collections.Counter()
        count: int = base.__len__(value)
        with contextlib.suppress(RuntimeError):  # another thread changes the container
            for each in islice(dict.values(value) if base is dict else base.__iter__(value), _MOST_ELEMENTS):
                kind = short_name(type(each)), ""
                if inert.is_a(each, torch.Tensor) and not inert.user_dispatches(type(each)):
                    kind = kind[0], f" {dtype_name(inert.tensor_fact(each, 'dtype'))}"
                    graphs = graphs if inert.tensor_fact(each, "grad_fn") is None else " with their graphs"
                kinds[kind] += 1
        shown = [f"{number:,} {name}{dtype}" for (name, dtype), number in kinds.most_common(_KINDS_SHOWN)]
        told = f" of {count:,}" + (f", the first {_MOST_ELEMENTS:,}" if count > _MOST_ELEMENTS else "")
        told += f": {', '.join(shown)}{', …' if len(kinds) > _KINDS_SHOWN else ''}" if shown else ""
        if len(kinds) == 1 and count <= _MOST_ELEMENTS:
            told = f" of {counted(count, kind[0])}{kind[1]}"
    return told + graphs + (f" ({counted(nodes, 'node')})" if nodes else "")


def short_name(cls: type) -> str:
    """Return the name of a class without those of the classes and functions around it."""
    return inert.qualname_of(cls).rpartition(".")[2]


def is_plain(cls: type) -> bool:
    """Return whether the instances of a class are containers without attributes: a walk finds their items only."""
    return any(cls is each for each in _PLAIN)  # not `in`, which would call `__eq__` of a metaclass


def _base_of(value: Any) -> Any:
    return next((base for base in CONTAINERS if inert.is_a(value, base)), None)
