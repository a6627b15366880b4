"""Files of compiled code: complete or absent, private, and never a reason for a call to fail."""

from __future__ import annotations

import os
import secrets
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from flexattn import kept_files

if os.name != "posix":
    pytest.skip("owners, modes and links are those of POSIX", allow_module_level=True)

KIND, CONTENT = "kernel 9", b"\x00\nsome code\n" * 100


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexattn.warn._warned", set())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_is_written_is_read_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    before = os.umask(0)
    try:
        assert kept_files.write(path, KIND, CONTENT, says=True) is None
    finally:
        os.umask(before)
    assert kept_files.read(path, KIND, says=True) == CONTENT
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert kept_files.read(path, "kernel 8", says=False) is None
    assert kept_files.read(path.with_name("other"), KIND, says=True) is None, "a file that is not there is no trouble"
    assert kept_files.read(tmp_path / "no" / "folder", KIND, says=True) is None


def to_nobody(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Another user's than this one, which root can make and somebody else can be."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        mine = os.geteuid()
        patch.setattr(os, "geteuid", lambda: mine + 1)


Spoil = Callable[[Path, pytest.MonkeyPatch], object]


def replaced_by_link(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced_by_folder(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_pipe(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path)


def one_bit_less(path: Path, patch: pytest.MonkeyPatch) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


SPOILT: dict[str, tuple[Spoil, str]] = {
    "one bit": (one_bit_less, "damaged"),
    "zeros": (lambda path, patch: path.write_bytes(bytes(path.stat().st_size)), "damaged"),
    "cut": (lambda path, patch: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
    "empty": (lambda path, patch: path.write_bytes(b""), "damaged"),
    "no newline": (lambda path, patch: path.write_bytes(b"\xff" * 5000), "damaged"),
    "link": (replaced_by_link, "symbolic link"),
    "folder": (replaced_by_folder, "no plain file"),
    "pipe": (replaced_by_pipe, "no plain file"),
    "writable by all": (lambda path, patch: path.chmod(0o666), "file can be written by others.*chmod go-w"),
    "writable by a group": (lambda path, patch: path.chmod(0o620), "file can be written by others"),
    "folder writable by all": (lambda path, patch: path.parent.chmod(0o777), "it can be written by others"),
    "of another user": (to_nobody, "belongs to user"),
    "in another user's folder": (lambda path, patch: to_nobody(path.parent, patch), "belongs to user"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_spoilt_is_a_miss_that_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spoil, reason = SPOILT[name]
    path = tmp_path / "kernels" / "file"
    kept_files.write(path, KIND, CONTENT, says=True)
    spoil(path, monkeypatch)
    with pytest.warns(RuntimeWarning, match=rf"compiled kernels are not read in .*{reason}") as said:
        found = [kept_files.read(path, KIND, says=True) for _ in range(2)]
    assert found == [None, None]
    assert len(said) == 1


def test_what_nobody_named_is_missed_in_silence_but_for_who_may_have_written_it(tmp_path: Path) -> None:
    path = tmp_path / "kernels" / "file"
    kept_files.write(path, KIND, CONTENT, says=False)
    path.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_files.read(path, KIND, says=False) is None
        assert kept_files.write(tmp_path / "kernels" / "file" / "deeper", KIND, CONTENT, says=False) is not None
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        kept_files.read(path, KIND, says=False)


def test_roots_files_and_a_read_only_file_system_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in an image that root has made, or one that is mounted for everybody to read."""
    path = tmp_path / "kernels" / "file"
    kept_files.write(path, KIND, CONTENT, says=True)
    with monkeypatch.context() as patch:
        found = os.fstat
        patch.setattr(os, "fstat", lambda descriptor: os.stat_result([*found(descriptor)[:4], 0, *found(descriptor)[5:]]))
        patch.setattr(os, "geteuid", lambda: 4242)
        assert kept_files.read(path, KIND, says=True) == CONTENT
    path.chmod(0o666)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda descriptor: os.statvfs_result([0] * 8 + [os.ST_RDONLY, 255]))
        assert kept_files.read(path, KIND, says=True) == CONTENT


UNWRITABLE: dict[str, Callable[[Path], object]] = {
    "a file in the folder's place": lambda folder: folder.write_text("mine"),
    "a file in the parent's place": lambda folder: (folder.parent.rmdir(), folder.parent.write_text("mine")),
    "a folder in the file's place": lambda folder: (folder / "file").mkdir(parents=True),
    "a broken link in the folder's place": lambda folder: folder.symlink_to("nowhere"),
    "a folder that others can write": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_is_said_once_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "parent" / "kernels"
    folder.parent.mkdir()
    UNWRITABLE[name](folder)
    before = {path: path.lstat().st_mode for path in tmp_path.rglob("*")}
    with pytest.warns(RuntimeWarning, match="compiled kernels are not written in .*compiled again") as said:
        reasons = [kept_files.write(folder / "file", KIND, CONTENT, says=True) for _ in range(2)]
    assert all(reasons)
    assert len(said) == 1
    assert {path: path.lstat().st_mode for path in tmp_path.rglob("*")} == before


def test_nothing_is_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No link is followed, at the file's path or at the path of its temporary part, even if its name is known."""
    precious, path = tmp_path / "precious", tmp_path / "kernels" / "file"
    precious.write_text("mine")
    path.parent.mkdir(mode=0o700)
    path.symlink_to(precious)
    assert kept_files.write(path, KIND, CONTENT, says=True) is None
    assert kept_files.read(path, KIND, says=True) == CONTENT
    monkeypatch.setattr(secrets, "token_hex", lambda size: "known")
    (path.parent / f".file.{os.getpid()}.{threading.get_ident()}.known").symlink_to(precious)
    with pytest.warns(RuntimeWarning, match="not written"):
        assert kept_files.write(path, KIND, b"other", says=True)
    assert precious.read_text() == "mine"
    assert kept_files.read(path, KIND, says=True) == CONTENT


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """A reader gets one writer's content, whole, or nothing yet."""
    path, wrong = tmp_path / "kernels" / "file", []
    contents = [bytes([n]) * 50_000 for n in range(4)]

    def work(n: int) -> None:
        for _ in range(30):
            if kept_files.write(path, KIND, contents[n], says=True) is not None:
                wrong.append("not written")
            if kept_files.read(path, KIND, says=True) not in contents:
                wrong.append("not read")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [file.name for file in path.parent.iterdir()] == ["file"]
