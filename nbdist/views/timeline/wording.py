"""Names the calls in a timeline, in words that a user knows.

A function of the user or of torch keeps its name. For functions of nbdist's own, which users do not know, the table
`_WORDS` has words. Calls that only look, such as calls of panels and of the recording itself, are left out (`_HIDDEN`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from nbdist.rpc import named
from nbdist.rpc.references.rref import RRef
from nbdist.wire.pickling.names import display_name

# The beginnings of the names of modules whose calls only look or interrupt: a timeline leaves these calls out.
_HIDDEN = (
    "nbdist.views.",
    "nbdist.rpc.world.clocks",
    "nbdist.rpc.calls.stopping",
    "nbdist.cluster.inspection.holdings",
    "nbdist.cluster.interrupting",
    "nbdist.cluster.inspection.status_report",
)
_OTHERS = "nbdist's own work"  # the name of all calls of nbdist that have no words in `_WORDS`


def name_call(label: str, callee: Any, args: Sequence[Any]) -> tuple[str, str] | None:
    """Return the kind of a call (of `views.drawing.gantt.KINDS`) and its name in a timeline; None if left out."""
    # A worker runs this for every recorded call, so it asks no other worker.
    module = str(getattr(callee, "__module__", None) or type(callee).__module__)
    if not module.startswith("nbdist."):
        owner = getattr(callee, "__self__", None)
        if "." not in label and isinstance(callee, MethodType) and not isinstance(owner, type):
            label = f"{type(owner).__qualname__}.{label}"  # the caller did not know the class of the value yet
        return "call", label.removesuffix(".__call__")
    if module.startswith(_HIDDEN):
        return None
    if module == named.__name__:
        kind, _, method = label.partition(".")
        if kind in _HIDDEN_NAMES:
            return None
        return "own", _of_server(method) if kind in ("server", "deputy") else _OF_NAMED.get(label, _OTHERS)
    place = f"{module.removeprefix('nbdist.')}:{getattr(callee, '__qualname__', label)}"
    if place.startswith("swarm.deputy:Deputy"):
        return "own", _of_server(place.partition("Deputy")[2].removeprefix("."))
    words = _WORDS.get(place, _OTHERS)
    if isinstance(words, str):
        return "own", words
    try:
        return words(*args)
    except Exception:  # the arguments do not have the form that the table expects, as after a change of the function
        return "own", _OTHERS


def _with_spaces(method: object) -> str:
    return str(method).strip("_").replace("_", " ")


def _class_of(rref: RRef[Any]) -> str:
    return rref.state.qualname if rref.state is not None else "module"


# The words for the methods of `nbdist.swarm.server.server.Server` and of its deputy, whose constructor is "".
_OF_SERVER: Mapping[str, str] = {
    "": "start to serve blocks",
    "load": "load blocks",
    "unload": "unload blocks",
    "open": "open a session",
    "close": "close a session",
    "push": "hidden states arrive",
    "step": "step through blocks",
    "forward": "forward through blocks",
    "backward": "backward through blocks",
    "export": "send a session's caches",
    "adopt": "take over a session",
}


def _of_server(method: object) -> str:
    return _OF_SERVER.get(str(method), "serve blocks")


# The named objects (`nbdist.rpc.named`) whose calls only look or mend.
_HIDDEN_NAMES = ("collectives", "mending", "recording", "scout", "watcher")
# Words for the methods of other named objects.
_OF_NAMED: Mapping[str, str] = {
    "pipeline.deliver": "a micro-batch arrives",
    "pipeline.abandon": "break off a pipeline step",
    "pushed.receive": "variables arrive",
    "checkpoint.read": "read weights",
}


def _task(function: Any, args: Sequence[Any], *_: Any) -> tuple[str, str]:
    """Return "call" and the name of the user's function that a task runs: ``function``, called with ``args``."""
    if "__nbdist_runs_tasks__" in getattr(function, "__globals__", ()):  # a function of ours, which calls the user's
        function = args[0]
    return "call", getattr(function, "expression", None) or display_name(function)


# For functions of nbdist, by module and name: words, which are of the kind "own", or a function of the call's arguments
# that returns kind and name. `test_the_functions_that_have_words_exist` finds a name that has changed.
_WORDS: Mapping[str, str | Callable[..., tuple[str, str]]] = {
    "nn.pipeline_part:build_stages": "build a pipeline's stages",
    "nn.pipeline_part:run_step": "a worker's share of a pipeline step",
    "nn.remote_module:create": lambda cls, *_: ("call", f"RemoteModule({display_name(cls)})"),
    "nn.remote_module:run": lambda rref, *_: ("call", f"{_class_of(rref)}.forward"),
    "nn.remote_module:parameters": lambda rref, *_: ("call", f"{_class_of(rref)}.parameters"),
    "nn.remote_module:train": lambda rref, *_: ("call", f"{_class_of(rref)}.train"),
    "nn.remote_module:state_of": lambda rref, *_: ("call", f"{_class_of(rref)}.state_dict"),
    "nn.remote_module:load": lambda rref, *_: ("call", f"{_class_of(rref)}.load_state_dict"),
    "nn.remote_module:load_part": lambda rref, *_: ("call", f"{_class_of(rref)}.load_state_dict"),
    "optim.local:new_local_optimizer": lambda cls, *_: ("own", f"make an optimizer ({display_name(cls)})"),
    "optim.local:call_local": lambda rref, method, *_: (
        "own",
        f"{_class_of(rref).removeprefix('Local').removesuffix('Part').lower()}: {_with_spaces(method)}",
    ),
    "optim.clipping:local_norms": "norms of gradients",
    "optim.clipping:scale_local": "clip gradients",
    "rpc.references.rref:_look": "peek at a value",
    "rpc.references.rref:_backward": "backward from a reference",
    "cluster.inspection.comparing:prints": "fingerprints of a value",
    "cluster.inspection.comparing:part_of": "part of a value",
    "cluster.worker.output:take_last_value": "value of a cell",
    "autograd.inspection:local_nodes": "look at a graph",
    "compat.gathering:gather_from_subtree": "gather objects",
    "compat.gathering:broadcast_to_followers": "hand gathered objects out",
    "compat.gathering:fail_gathering": "tell that a gathering failed",
    "cluster.worker.tasks:run": _task,
}
