"""Reads the facts about a process that decide its results beside its data: its code, settings and random generators."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from types import ModuleType
from typing import Any

import torch

from nbdist.cluster.examination.cell_functions import read_cell_functions
from nbdist.cluster.examination.imported_files import read_files
from nbdist.cluster.examination.replaced import replaced_functions
from nbdist.nn.randomness import random_state

CodeFacts = dict[str, dict[str, str]]
"""The facts about one process: for each topic, a text for each key. `describe_code` has the topics."""

# Variables that differ in healthy programs: of ranks, ports, pids, devices, hosts, sessions and shells, and those that
# packages set when they are imported.
_BY_DESIGN = re.compile(
    r"(.*_)?(RANK|PORT|PID|ADDR|HOST|HOSTNAME|VISIBLE_DEVICES|SOCKET_IFNAME|TMPDIR|ID|SOCK|WORLD_SIZE)|_|TERM|COLUMNS|"
    r"(NBDIST|JPY|TORCHELASTIC|SLURM|PMIX?|OMPI|PRTE|RAY|KUBERNETES|SSH|XDG|DBUS|TERM|SYSTEMD|LC)_.*|LINES|PWD|OLDPWD|"
    r"(SLURMD|PBS|MPI|POD)_.*|(.*_)?(NODE_?NAME|IP)|"
    r"SHLVL|SHELL|HOME|USER|LOGNAME|MAIL|DISPLAY|LS_COLORS|LESS\w*|JOURNAL_STREAM|PS1|MPLBACKEND|KMP_INIT_AT_FORK|.*CACHE.*"
)
_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|DSN|CONNECTION_STRING|COOKIE|(^|_)PAT(_|$)", re.IGNORECASE
)
_SECRET_IN_ADDRESS = re.compile(r"://[^/\s]*@")


def describe_code() -> CodeFacts:
    """Return the facts about this process."""
    files, host = read_files(), platform.node()
    modules = [(name, module) for name, module in list(sys.modules.items()) if issubclass(type(module), ModuleType)]
    packages = {name: module for name, module in modules if "." not in name}
    versions = {name: vars(packages[name]).get("__version__") for name in packages.keys() - sys.stdlib_module_names}
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    return {
        "changed": {name: path for name, (path, _, has_changed) in files.items() if has_changed},
        "modules": {name: f"content {digest[:8]}" for name, (_, digest, _) in files.items()},
        # By host: the hosts of a healthy cluster may keep the same files in different folders.
        "files": {f"{name} on {host}": path for name, (path, _, _) in files.items()},
        "torch": replaced_functions(),
        "functions": read_cell_functions(),
        "versions": {"Python": platform.python_version(), **{n: v for n, v in versions.items() if isinstance(v, str)}},
        "environment": {
            name: _shown(name, each) for name, each in os.environ.items() if not _BY_DESIGN.fullmatch(name)
        },
        "random states": {name: _digest(state) for name, state in random_state(device).items()},
    }


def _shown(name: str, value: str) -> str:
    """Return a variable's value, or a digest of a long one, or of a secret, which stays in its process."""
    is_hidden = len(value) > 60 or any((_SECRET.search(name), _SECRET_IN_ADDRESS.search(value)))
    return f"a value with digest {_digest(value)[:6]}" if is_hidden else value or "empty"


def _digest(state: Any) -> str:
    parts = state if isinstance(state, tuple) else (state,)
    texts = [part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]
    return hashlib.sha256(repr(texts).encode()).hexdigest()
