"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from .common import UserError

__all__ = ["check_target", "replace_file"]


def check_target(path: str) -> Path:
    """Where a file written to `path` will stand: a symbolic link is followed, and stays.

    Raises
    ------
    UserError
        It can be told beforehand that nothing can be written there.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise UserError(f"{path} is a symbolic link that leads back to itself")
        if target.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
        if target.exists() and not target.is_file():
            raise UserError(f"{path} is not a regular file")
        if target.exists() and not os.access(target, os.W_OK):
            raise UserError(f"{path} is write-protected")
        if not target.parent.is_dir():
            raise UserError(f"{path} can't be written: there is no folder {target.parent}")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise UserError(f"{path} can't be written: no permission to write in the folder {target.parent}")
    except (OSError, ValueError) as e:
        raise UserError(f"{path} can't be written: {getattr(e, 'strerror', None) or e}") from e
    return target


def replace_file(path: str, data: bytes) -> None:
    """Put `data` at `path`: at any moment there is the old file or the new one, whole.

    The file is written beside its place under another name, forced to the disk and
    renamed; whatever goes wrong before that, Ctrl-C included, removes it. A file
    that was there gives its permissions, and its owner where the system lets it.

    Raises
    ------
    UserError
        It can't be written; the message says why.
    """
    target = check_target(path)
    temporary = None
    try:
        old = target.stat() if target.exists() else None
        handle, temporary = tempfile.mkstemp(prefix=".convpar-", suffix=target.suffix, dir=target.parent)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            _set_permissions(handle, old)
            os.fsync(handle)
        os.replace(temporary, target)
        temporary = None
        _sync_folder(target.parent)
    except OSError as e:
        raise UserError(f"{path} can't be written: {e.strerror}") from e
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _set_permissions(handle: int, old: os.stat_result | None) -> None:
    if old is None:
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(handle, 0o666 & ~umask)
        return
    new = os.fstat(handle)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        # Only the superuser may give a file away; anybody's file is then the writer's, as after a copy.
        with contextlib.suppress(PermissionError):
            os.chown(handle, old.st_uid, old.st_gid)
    os.chmod(handle, stat.S_IMODE(old.st_mode))


def _sync_folder(folder: Path) -> None:
    # The renaming itself may still be only in memory. Not every system lets a folder be opened.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
