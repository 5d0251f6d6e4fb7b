"""The secret, what is derived from it, and the directory where it lies."""

import os
import stat
import subprocess
import sys
import threading

import pytest
import zmq

from nbdist import SecurityError
from nbdist.channel.secret import Secret, runtime_directory

KEY = b"sixteen bytes or more"


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    path = tmp_path / "runtime"
    monkeypatch.setenv("NBDIST_RUNTIME_DIR", str(path))
    monkeypatch.delenv("NBDIST_SECRET_FILE", raising=False)
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# --- where it comes from --------------------------------------------------------------------------


def test_a_given_secret_is_taken_as_it_is(runtime):
    assert Secret.find("sixteen letters, at least").derive("x") == Secret.find(b"sixteen letters, at least").derive("x")
    assert Secret.find(KEY).shared_off_host
    assert not runtime.exists()


@pytest.mark.parametrize("value", ["", "short", b"fifteen bytes.."])
def test_a_short_secret_is_refused(runtime, value):
    with pytest.raises(SecurityError, match="16 bytes"):
        Secret.find(value)


def test_a_file_can_hold_it(runtime, tmp_path, monkeypatch):
    file = tmp_path / "secret.txt"
    file.write_bytes(KEY + b"\n")
    monkeypatch.setenv("NBDIST_SECRET_FILE", str(file))
    secret = Secret.find(None)
    assert secret.shared_off_host
    assert secret.derive("x") == Secret.find(KEY).derive("x")
    assert Secret.find(b"another secret, given").derive("x") != secret.derive("x")
    file.write_bytes(b"short\n")
    with pytest.raises(SecurityError):
        Secret.find(None)
    file.unlink()
    with pytest.raises(SecurityError, match=r"secret\.txt"):
        Secret.find(None)


def test_the_users_own_is_made_once_and_for_the_user_alone(runtime):
    first = Secret.find(None)
    assert not first.shared_off_host
    assert mode(runtime / "secret") == 0o600
    assert mode(runtime) == 0o700
    assert Secret.find(None).derive("x") == first.derive("x")
    assert [path.name for path in runtime.iterdir()] == ["secret"]


def test_of_many_who_make_it_at_once_all_have_the_same(runtime):
    start, found, lock = threading.Barrier(8), [], threading.Lock()

    def find():
        start.wait(20)
        secret = Secret.find(None).derive("x")
        with lock:
            found.append(secret)

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in runtime.iterdir()] == ["secret"]


@pytest.mark.parametrize("permissions", [0o644, 0o640, 0o604, 0o666, 0o610])
def test_a_secret_that_others_can_read_is_refused(runtime, permissions):
    Secret.find(None)
    (runtime / "secret").chmod(permissions)
    with pytest.raises(SecurityError, match="chmod 600"):
        Secret.find(None)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@needs_root
def test_a_secret_of_another_user_is_refused(runtime):
    Secret.find(None)
    os.chown(runtime / "secret", 12345, 12345)
    with pytest.raises(SecurityError, match="secret"):
        Secret.find(None)


# --- the directory --------------------------------------------------------------------------------


def test_the_directory_is_made_and_kept_for_this_user_alone(runtime):
    assert runtime_directory() == runtime
    assert mode(runtime) == 0o700
    runtime.chmod(0o777)
    runtime_directory()
    assert mode(runtime) == 0o700


@pytest.mark.parametrize("own", [True, False])
def test_a_link_to_a_directory_is_refused(runtime, tmp_path, own):
    target = tmp_path / "target"
    if own:
        target.mkdir()
    runtime.symlink_to(target)
    with pytest.raises(SecurityError, match="not a directory of this user"):
        runtime_directory()


def test_a_file_in_its_place_is_refused(runtime):
    runtime.write_text("")
    with pytest.raises(SecurityError, match="not a directory of this user"):
        runtime_directory()


@needs_root
def test_a_directory_of_another_user_is_refused(runtime):
    runtime.mkdir()
    os.chown(runtime, 12345, 12345)
    with pytest.raises(SecurityError, match="not a directory of this user"):
        runtime_directory()


def test_without_the_variable_it_is_named_after_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("NBDIST_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_directory() == tmp_path / f"nbdist-{os.getuid()}"


# --- what is derived ------------------------------------------------------------------------------


def test_every_purpose_has_bytes_of_its_own():
    secret = Secret.find(KEY)
    derived = {secret.derive(purpose) for purpose in ("sign", "curve door", "curve member", "")}
    assert len(derived) == 4
    assert all(len(value) == 32 for value in derived)
    assert KEY not in b"".join(derived)
    assert Secret.find(KEY + b".").derive("sign") not in derived


def test_what_is_derived_is_the_same_in_every_process():
    code = f"from nbdist.channel.secret import Secret; print(Secret.find({KEY!r}).derive('x').hex())"
    path = os.pathsep.join(filter(None, sys.path))
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert other.stdout.strip() == Secret.find(KEY).derive("x").hex()


def test_only_what_was_signed_with_this_secret_is_verified():
    secret = Secret.find(KEY)
    for data in (b"", b"x", bytes(1000)):
        signed = secret.sign(data)
        assert secret.verify(signed) == data
        for index in {0, 31, len(signed) - 1}:
            damaged = bytearray(signed)
            damaged[index] ^= 1
            with pytest.raises(SecurityError):
                secret.verify(bytes(damaged))
        for length in range(min(len(signed), 40)):
            with pytest.raises(SecurityError):
                secret.verify(signed[:length])
        with pytest.raises(SecurityError, match="another cluster"):
            Secret.find(b"another secret, as long").verify(signed)


def test_the_key_pairs_are_zeromqs():
    secret = Secret.find(KEY)
    door, member = secret.curve("door"), secret.curve("member")
    assert door != member
    for public, private in (door, member):
        assert len(public) == len(private) == 40
        assert zmq.curve_public(private) == public
    assert Secret.find(KEY).curve("door") == door
