"""Jupyter's messages as bytes: pure, and quicker than the general library, for the one thread that reads all output.

The notebook reads a dozen messages for an empty cell on four workers. Half of the time that `jupyter_client` takes
for them goes into dates that nobody here looks at.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from jupyter_client.session import json_packer, json_unpacker

from nbdist.errors import ProtocolError

__all__ = ["decode", "encode", "new_header", "new_id", "pack", "unpack"]

_DELIMITER = b"<IDS|MSG>"
_VERSION = "5.4"

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def pack(value: Any) -> bytes:
    """A value as JSON."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError):  # what only the general packer knows, such as surrogates
        return json_packer(value)


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """A value from JSON."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:  # NaN, which Python writes and JSON does not know
        return json_unpacker(bytes(data))


def new_id() -> str:
    """An id for a message."""
    return uuid.uuid4().hex


def new_header(kind: str, session: str, id: str | None = None) -> dict[str, Any]:
    """The header of a message that has not been sent before."""
    return {
        "msg_id": id or new_id(),
        "msg_type": kind,
        "username": "nbdist",
        "session": session,
        "date": datetime.now(UTC).isoformat(),
        "version": _VERSION,
    }


def encode(
    key: bytes,
    header: Mapping[str, Any],
    content: bytes,
    *,
    parent: Mapping[str, Any] | None = None,
    metadata: bytes = b"{}",
    buffers: Sequence[Any] = (),
) -> list[Any]:
    """A message as frames; ``content`` and ``metadata`` are packed, once for all who get the same."""
    parts = [pack(header), pack(parent or {}), metadata, content]
    return [_DELIMITER, _sign(key, parts), *parts, *buffers]


def decode(key: bytes, frames: Sequence[bytes]) -> dict[str, Any]:
    """Read the message in some frames; one that is not signed with the key, or not whole, is a ProtocolError."""
    try:
        start = frames.index(_DELIMITER)
        signature, *parts = frames[start + 1 : start + 6]
        if len(parts) != 4 or not hmac.compare_digest(signature, _sign(key, parts)):
            raise ProtocolError("a message of a kernel has a wrong signature")
        header, parent, metadata, content = map(unpack, parts)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"not a message of a kernel: {error}") from None
    if not all(isinstance(part, dict) for part in (header, parent, metadata, content)):
        raise ProtocolError("not a message of a kernel: its header, parent, metadata and content must be objects")
    id, kind = header.get("msg_id"), header.get("msg_type")
    answers = parent.get("msg_id", "")
    if not (isinstance(id, str) and isinstance(kind, str) and isinstance(answers, str)):
        raise ProtocolError(
            f"not a message of a kernel: its id is {id!r}, its type {kind!r}, its parent's id {answers!r}"
        )
    return {
        "header": header,
        "msg_id": id,
        "msg_type": kind,
        "parent_header": parent,
        "metadata": metadata,
        "content": content,
        "buffers": list(frames[start + 6 :]),
    }


def _sign(key: bytes, parts: Sequence[bytes]) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256").hex().encode()
