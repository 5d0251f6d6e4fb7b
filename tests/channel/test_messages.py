"""The messages of errors of channels and of the encoding that no other test provokes."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest
import torch

from nbdist.channel import secret
from nbdist.channel.shared_memory import mapping
from nbdist.errors import DecodeError, EncodeError, NbdistError, UsageError
from nbdist.wire import tensors
from nbdist.wire.devices import Devices
from nbdist.wire.messages import TensorMeta


@pytest.mark.parametrize(
    ("directory", "text"),
    [
        ("here", r"NBDIST_RUNTIME_DIR must be an absolute path, not 'here'"),
        ("/dev/null/below", r"the runtime directory /dev/null/below cannot be made: Not a directory"),
        ("/tmp/" + "deep/" * 20, r"is too long: the path of a socket may have 107 bytes, and nbdist needs \d+ of them"),
    ],
)
def test_runtime_directories_that_cannot_be(monkeypatch, directory, text):
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", directory)
    with pytest.raises(UsageError, match=text):
        secret.runtime_directory()


def test_a_runtime_directory_that_cannot_be_written_to(monkeypatch, tmp_path):
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UsageError, match=r"this process cannot write to the runtime directory /tmp/"):
        secret.runtime_directory()


def test_no_temporary_directory(monkeypatch):
    def full():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("NBDIST_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(UsageError, match=r"no temporary directory can be written to \(No usable temporary directory"):
        secret.runtime_directory()


def test_memory_that_the_system_refuses(monkeypatch):
    file = mapping.create("nbdist-test", 4096)
    try:
        with pytest.raises(NbdistError, match=r"cannot map .*: "):
            mapping.Mapping(file, 1 << 62)
    finally:
        os.close(file)

    def refuse(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(NbdistError, match=r"cannot make 4.1 KB of shared memory: "):
        mapping.create("nbdist-test", 4096)


def test_a_tensor_on_a_device_without_a_map():
    with pytest.raises(EncodeError, match=r"a tensor is on cuda:0, and no device map says where it goes on worker1"):
        Devices("worker1").of(torch.device("cuda:0"))


def test_shared_memory_that_cannot_be_read():
    one_double = TensorMeta(0, 1, [1], None, 0, 0)
    with pytest.raises(DecodeError, match=r"the sender's shared memory cannot be read in this process: it is gone"):
        tensors.unpack_tensors([one_double], [(-1, 0, 8)], [], [tensors.Unreadable("it is gone")])
