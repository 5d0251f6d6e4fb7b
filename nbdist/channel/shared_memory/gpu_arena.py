"""The memory of GPUs in which an agent passes tensors to other processes that use the same GPU.

`GpuArena` is an `Arena` whose segments are memory of one GPU. The sender copies a tensor into a block once, on the GPU.
The receiver reads the block in place. The sender waits until the copy is complete, and the receiver gives a block back
only when its GPU has finished all earlier work. So no stream of either process needs to wait for a stream of the other.

`Gpus` has everything that one agent needs for this: an arena for each GPU that it sees, and a socket for descriptors.
"""

from __future__ import annotations

import os

import torch

from nbdist.channel.shared_memory import gpu_memory, quiet
from nbdist.channel.shared_memory.arena import Arena, ArenaSlot
from nbdist.channel.shared_memory.descriptors import Descriptors
from nbdist.channel.shared_memory.gpu_memory import GRANULE, GpuMapping
from nbdist.channel.shared_memory.mapping import MemoryFailure
from nbdist.signals import DeferredSignals
from nbdist.wire.messages import Place

# Segments from this number on are memory of a GPU. Those of GPU 1 begin at twice this number, and so on.
FIRST_GPU_SEGMENT = 1 << 40
_PART = 4  # an arena may take a quarter of the GPU memory that torch may take in this process


class GpuArena(Arena):
    """The memory of one GPU in which one agent lends blocks to others. Any thread may use it."""

    def __init__(self, incarnation: int, index: int, bound: int, threshold: int, descriptors: Descriptors) -> None:
        """Make an empty arena on GPU ``index`` that grows to at most ``bound`` bytes."""
        super().__init__(incarnation, bound, threshold, first=FIRST_GPU_SEGMENT * (index + 1), segment_size=GRANULE)
        self.index = index
        self._descriptors = descriptors
        self._known: dict[int, set[int]] = {}  # the segments whose descriptor was sent, by the receiver's incarnation
        # The receivers, by incarnation, that must still be told that a segment is closed, and the segment.
        self._untold: list[tuple[int, int]] = []

    def put_tensor(self, part: torch.Tensor, receiver: int) -> ArenaSlot | None:
        """Copy a tensor of bytes, which is on this GPU, into a block for ``receiver``, after its stream's earlier work.

        Returns when the copy is complete; None if there is no room, or the memory cannot be passed to the receiver.
        """
        slot, mapped = self.take(part.numel(), receiver)
        if slot is None or not self._introduce(slot.place, receiver):
            return None  # the slot is collected, which frees its block
        try:
            mapped.part(slot.place.offset, slot.place.length).copy_(part)
        finally:  # after Ctrl-C, too: the block may be used for another tensor at once
            torch.cuda.current_stream(self.index).synchronize()
        return slot

    def _introduce(self, place: Place, receiver: int) -> bool:
        """Send a receiver the descriptor of a place's segment, unless it has it; return whether it has it now."""
        with DeferredSignals(), self._lock:
            known = self._known.get(receiver, set())
            if place.segment in known:
                return True
            if self._is_closed:
                return False
            try:
                self._descriptors.send(receiver, _label(place.segment), place.file)
            except MemoryFailure:
                self.falls_back += 1
                return False
            known.add(place.segment)
            self._known[receiver] = known
            return True

    def forget(self, receiver: int, *, is_dead: bool) -> None:
        """Do what `Arena.forget` does, and send the receiver nothing more."""
        with DeferredSignals(), self._lock:
            self._known.pop(receiver, None)
            self._untold = [each for each in self._untold if each[0] != receiver]
        super().forget(receiver, is_dead=is_dead)

    def trim(self) -> None:
        """Free memory that was not used lately, and tell receivers of closed segments, so that they free it, too."""
        super().trim()
        with DeferredSignals(), self._lock:
            untold, self._untold = self._untold, []
            for receiver, segment in untold:
                try:
                    self._descriptors.send(receiver, _label(segment), None)
                except MemoryFailure:
                    if receiver in self._known:  # else it is gone
                        self._untold.append((receiver, segment))  # the next call tries again

    def _close(self, segment: int) -> None:
        super()._close(segment)
        for receiver, known in self._known.items():
            if segment in known:
                known.discard(segment)
                self._untold.append((receiver, segment))

    def _make(self, segment: int, size: int) -> None:
        self._files[segment], self._mappings[segment] = gpu_memory.create(self.index, size)


class Gpus:
    """Lends one agent's GPU memory to other agents, and maps theirs."""

    def __init__(self, incarnation: int, threshold: int, uuids: list[str]) -> None:
        """Take no memory yet. ``uuids`` has the ids of the GPUs by number, "" for a GPU that cannot share memory.

        Raises MemoryFailure if the system refuses the socket or the thread that waits for GPUs.
        """
        try:
            quiet.start()
        except RuntimeError as error:
            raise MemoryFailure(f"cannot wait for GPUs: {error}") from error
        self.uuids = uuids
        self.descriptors = Descriptors(incarnation)
        self.arenas = [
            GpuArena(incarnation, index, _bound(index), threshold, self.descriptors)
            for index, uuid in enumerate(uuids)
            if uuid
        ]

    def reachable(self, uuids: list[str]) -> dict[str, GpuArena]:
        """Return the arenas that an agent can read, by its name for the GPU. ``uuids`` are the ids of its GPUs."""
        here = {self.uuids[arena.index]: arena for arena in self.arenas}
        return {f"cuda:{index}": here[uuid] for index, uuid in enumerate(uuids) if uuid in here}

    def open(self, owner: int, segment: int, size: int, uuids: list[str]) -> GpuMapping:
        """Map a segment of another agent's arena; ``uuids`` are the ids of that agent's GPUs.

        Raises MemoryFailure if its descriptor has not arrived, or it cannot be mapped.
        """
        number = segment // FIRST_GPU_SEGMENT - 1
        uuid = uuids[number] if number < len(uuids) else ""
        if not uuid or uuid not in self.uuids:
            raise MemoryFailure("it is on a GPU that this process does not see")
        file = self.descriptors.take(owner, _label(segment))
        try:
            found = gpu_memory.open_descriptor(file, self.uuids.index(uuid), size)
        except BaseException:
            self.descriptors.put_back(owner, _label(segment), file)  # for the next message: it is sent only once
            raise
        os.close(file)
        return found

    def take_closed(self) -> list[tuple[int, int]]:
        """Return the segments that their owners have closed since the last call, as (owner's incarnation, number)."""
        prefix = _label(0)[:-1]
        closed = self.descriptors.take_closed()
        return [(owner, int(label.removeprefix(prefix), 16)) for owner, label in closed if label.startswith(prefix)]

    def close(self) -> None:
        """Release all memory except what tensors still refer to."""
        for arena in self.arenas:
            arena.close()
        self.descriptors.close()


def open_gpus(incarnation: int, threshold: int) -> Gpus | None:
    """Return an agent's memory on GPUs; None if the driver cannot share any. Starts CUDA in this process."""
    uuids = [uuid if gpu_memory.is_available(index) else "" for index, uuid in enumerate(gpu_memory.uuids())]
    if not any(uuids):
        return None
    try:
        return Gpus(incarnation, threshold, uuids)
    except MemoryFailure:
        return None


def _label(segment: int) -> str:
    return f"segment-{segment:x}"


def _bound(index: int) -> int:
    whole = torch.cuda.get_device_properties(index).total_memory
    return int(whole * torch.cuda.get_per_process_memory_fraction(index)) // _PART
