"""Reads and writes safetensors files so that weights begin at multiples of 64 bytes in memory, as torch's own do.

On some processors, MKL's product of one row by a matrix has other last bits if the matrix begins elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

WEIGHTS = "model.safetensors"  # the weights, in a model's folder
_ALIGN = 64  # weights begin at multiples of this many bytes


class WeightFile:
    """The weights in a folder's file. `read` maps them, so that all processes of a host share their memory.

    Raises OSError if there is no such file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / WEIGHTS
        # The header of the file says where each weight is, so the sizes are known without reading the weights.
        with open(self._path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin = file.tell()
        spans = {name: told["data_offsets"] for name, told in header.items() if name != "__metadata__"}
        self.sizes: dict[str, int] = {name: end - start for name, (start, end) in spans.items()}
        # Bytes that `read` copies, because they are not aligned.
        self.copied = sum(end - start for start, end in spans.values() if (begin + start) % _ALIGN)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weights with these ``names``: mapped from the file, or copied if they are not aligned there."""
        with safe_open(self._path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in names}
        # torch allocates at multiples of 64 bytes, so a clone is aligned.
        return {name: weight.clone() if weight.data_ptr() % _ALIGN else weight for name, weight in weights.items()}


def mark_of(folder: str | Path) -> tuple[int, ...]:
    """Return numbers that identify the file of weights in a folder. Raises OSError if there is no such file.

    Two hosts that see the same file, such as in a network folder, get the same numbers.
    """
    found = (Path(folder) / WEIGHTS).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def write_weights(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write weights into a folder's file, aligned as far as the format can, which has no gaps between weights."""
    # Weights whose sizes are multiples of 64 bytes come first, so each of them is aligned. Among the others, larger
    # elements first: each then begins at a multiple of its elements' size, as readers expect.
    names = sorted(weights, key=lambda name: (weights[name].nbytes % _ALIGN > 0, -weights[name].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        weight, begin = weights[name], end
        end = begin + weight.nbytes
        # The format's name of the dtype, from the header of a file without elements.
        like = json.loads(save({name: torch.empty(0, dtype=weight.dtype)})[8:])[name]
        header[name] = {**like, "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)  # the format allows spaces here
    with open(folder / WEIGHTS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(weights[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
