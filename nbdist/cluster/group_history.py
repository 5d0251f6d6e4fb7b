"""`GroupHistory`: the collectives of one process group, as one of its members has called them. Plain data.

`Transfers` are its sends and receives, which are counted for each pair of members.

Every member numbers the collectives of a group from 1, in the order in which it calls them. So in a healthy program
the members agree on what each number is; `nbdist.cluster.partings` compares them.
"""

from __future__ import annotations

import re

import msgspec

TRANSFERS = ("send", "recv")
"""The kinds of operations of two members."""


class Given(msgspec.Struct, frozen=True):
    """A kind of collective, with the tensors that a member gave to it."""

    kind: str
    """The operation that runs, such as ``all_reduce``."""
    tensors: str = ""
    """The tensors, such as ``float32[4, 3]``; empty for a barrier."""
    elements: int | None = None
    """The number of elements on which all members must agree; None for a kind where they may differ."""
    dtype: str = ""
    call: str = ""
    """The function of ``torch.distributed`` that the user called; empty where it is not known."""
    place: str = ""
    """The line of the user's code that called it, such as ``In[7]:12``; empty where it is not known."""
    root: int | None = None
    """The global rank of the member from which or to which all values go; None if there is none, or it is not known."""

    @property
    def bytes(self) -> int:
        """The number of bytes on which all members must agree; 0 where they may differ, or it is not known."""
        bits = re.search(r"\d+", self.dtype)
        return (self.elements or 0) * (int(bits[0]) // 8 if bits else self.dtype == "bool")

    def agrees_with(self, other: Given) -> bool:
        """Return whether two members that gave this and ``other`` are in the same collective."""
        is_same_call = self.call == other.call or not self.call or not other.call
        same = (self.kind, self.elements, self.dtype) == (other.kind, other.elements, other.dtype)
        return same and is_same_call and (self.root == other.root or None in (self.root, other.root))

    @property
    def name(self) -> str:
        """The collective's name, as the user knows it."""
        return self.call or self.kind

    @property
    def text(self) -> str:
        """The collective with its tensors and its line, such as ``broadcast float32[4] from rank 1 (In[7]:12)``."""
        way = "to" if self.kind in ("reduce", "gather") else "from"
        root = "" if self.root is None else f" {way} rank {self.root}"
        return f"{self.name} {self.tensors}".rstrip() + root + (f" ({self.place})" if self.place else "")


class Wait(msgspec.Struct, frozen=True):
    """A collective that has not ended."""

    number: int
    owner: str = ""
    """The module or the gradients for which DDP or FSDP2 has called it, such as ``module layers.0``."""


class Transfers(msgspec.Struct, frozen=True):
    """The sends of one member to another one of its group, with the same tag; or its receives."""

    is_send: bool
    peer: int
    """The global rank of the other member; -1 for receives from any member."""
    tag: int
    count: int
    newest: list[Given]
    """The last ones, from the newest on."""
    waits: bool = False
    """True if the member's main thread is in a call of this kind, or in a ``wait`` that may be for one of these."""


class GroupHistory(msgspec.Struct, frozen=True):
    """The last collectives of a process group that one member has called."""

    name: str
    """torch's name of the group, which is the same on all members."""
    title: str
    """The group in a user's words."""
    ranks: list[int]
    """The global ranks of the members."""
    first: int = 1
    """The number of the oldest collective in `given`: the recorder has lost those before it."""
    given: list[int] = []
    """For each number from `first` on, the index of what was given in `kinds`."""
    kinds: list[Given] = []
    waits: list[Wait] = []
    busy: bool = False
    """True if a thread of the member runs the user's code: it may yet call more."""
    transfers: list[Transfers] | None = None
    """The sends and receives; None where they are not known, as while the member holds the GIL."""

    @property
    def last(self) -> int:
        """The number of the last collective that this member has called."""
        return self.first + len(self.given) - 1
