"""Files of compiled code, kept between processes: complete, private, and never a reason for a call to fail.

The first line of a file has its kind, its version, and the sha256 digest of the rest. A file is read only if nobody else can have
written it. One of two conditions is enough: the file system is mounted read-only, or the file and its folder belong to this user or
to root and neither their group nor others can write them. A symbolic link to a file is not followed; a link to a folder is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from flexattn.warn import warn_once

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_PLAIN = os.O_CLOEXEC | _NO_LINK | os.O_NONBLOCK if os.name == "posix" else 0  # does not wait for a named pipe
_HEAD = 200  # the most bytes of a first line


class _Unusable(Exception):
    """Reason not to read or write a file or folder."""


class _Distrusted(_Unusable):
    """Reason to assume that another user may have written a file or folder."""


def read(path: Path, kind: str, says: bool) -> bytes | None:
    """Returns the content of a file that `write` wrote with the same `kind`; None if there is no such file or it is not trusted.

    The function never raises. If another user could have written the file, a RuntimeWarning says so once for each folder. If
    `says`, it reports all other problems too, for a user who named the folder.
    """
    try:
        with _folder(path.parent) as folder:
            return _content(path, folder, kind)
    except FileNotFoundError:
        return None
    except (OSError, _Unusable) as e:
        if says or isinstance(e, _Distrusted):
            _say(path, kind, "read", e)
        return None


def write(path: Path, kind: str, content: bytes, says: bool) -> str | None:
    """Writes a file atomically, because other processes may read it. Returns None, or the reason for a failure.

    A missing folder is created. Only this user may read or write the folder and the file. says: as for `read`.
    """
    import secrets  # a late import: few processes write a file, but each that launches a kernel reads one

    head = f"flexattn {kind} {hashlib.sha256(content).hexdigest()}\n".encode()
    part = f".{path.name}.{os.getpid()}.{threading.get_ident()}.{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _folder(path.parent) as folder:
            try:
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=folder)
                with open(descriptor, "wb") as file:
                    file.write(head + content)
                os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
    except (OSError, _Unusable) as e:
        if says or isinstance(e, _Distrusted):
            _say(path, kind, "written", e)
        return str(e)
    return None


def let_all_read(folder: Path, suffix: str) -> None:
    """Makes the files with this suffix readable for all users, so that an image can ship them.

    The folder becomes readable too if it holds no other files.
    """
    paths = list(folder.iterdir())
    ours = [path for path in paths if path.suffix == suffix and path.is_file() and not path.is_symlink()]
    for path in ours:
        path.chmod(0o644)
    if len(ours) == len(paths):
        folder.chmod(0o755)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(descriptor, "it")
        yield descriptor
    finally:
        os.close(descriptor)


def _content(path: Path, folder: int, kind: str) -> bytes:
    descriptor = os.open(path.name, os.O_RDONLY | _PLAIN, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _Unusable(f"{path.name} is no plain file")
        _check(descriptor, path.name)
        with open(descriptor, "rb", closefd=False) as file:
            head, content = file.readline(_HEAD), file.read()
    finally:
        os.close(descriptor)
    if head != f"flexattn {kind} {hashlib.sha256(content).hexdigest()}\n".encode():
        raise _Unusable(f"{path.name} is damaged, or is of another version")
    return content


def _check(descriptor: int, name: str) -> None:
    """Raises _Distrusted if a user other than this one and root could have written a file or folder."""
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return
    status = os.fstat(descriptor)
    if status.st_uid not in (os.geteuid(), 0):
        raise _Distrusted(
            f"{name} belongs to user {status.st_uid}, neither to this one ({os.geteuid()}) nor to root; copy or chown it"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Distrusted(f"{name} can be written by others (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w it")


def _say(path: Path, kind: str, action: str, e: Exception) -> None:
    folder, name = path.parent, kind.partition(" ")[0]
    warn_once(f"{folder} {name} {action} {type(e)}", f"compiled {name}s are not {action} in {folder}, but compiled again: {e}")
