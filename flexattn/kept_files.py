"""Files of compiled code, kept between processes: whole, private, and never a reason for a call to fail.

A file begins with a line that names its kind and version and has the sha256 digest of the rest. It is read only where nobody else
can have written it: it and its folder belong to this user or to root, and neither their group nor everybody can write them, or they
are on a file system that is mounted read-only. A symbolic link in a file's place is not followed; a folder may be one.
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
_PLAIN = os.O_CLOEXEC | _NO_LINK | os.O_NONBLOCK if os.name == "posix" else 0  # a named pipe is not waited for
_HEAD = 200  # bytes that a first line has at most


class _Unusable(Exception):
    """Reason why a file or folder is not read or written."""


class _Distrusted(_Unusable):
    """Reason that a file or folder may have been written by somebody else."""


def read(path: Path, kind: str, says: bool) -> bytes | None:
    """Returns the content of a file that `write` wrote with the same `kind`; None where there is none, or none to be trusted.

    Raises nothing for whatever is in the file's place. A RuntimeWarning says once for each folder who else could have written it
    and, if `says`, what else is wrong: as a user who named the folder wants to know.
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
    """Writes a file at once, as other processes may read it. Returns None, or why it could not; `says` is that of `read`.

    The folder is made where it is missing, for this user alone, as the file is.
    """
    import secrets  # here, as few processes write a file, and all that launch a kernel read one

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
    """Makes files that are to be shipped readable for whoever runs the image that they are put into.

    The folder too is opened to readers, unless it holds anything else.
    """
    found = list(folder.iterdir())
    ours = [path for path in found if path.suffix == suffix and path.is_file() and not path.is_symlink()]
    for path in ours:
        path.chmod(0o644)
    if len(ours) == len(found):
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
    """Raises _Distrusted for a file or folder that another user than root could have written."""
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return
    found = os.fstat(descriptor)
    if found.st_uid not in (os.geteuid(), 0):
        raise _Distrusted(
            f"{name} belongs to user {found.st_uid}, neither to this one ({os.geteuid()}) nor to root; copy or chown it"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Distrusted(f"{name} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it")


def _say(path: Path, kind: str, what: str, e: Exception) -> None:
    folder, name = path.parent, kind.partition(" ")[0]
    warn_once(f"{folder} {name} {what} {type(e)}", f"compiled {name}s are not {what} in {folder}, but made anew: {e}")
