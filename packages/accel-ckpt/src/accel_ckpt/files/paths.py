"""Checks of file names that were read from a file: they must be plain files inside their folder."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.files.digests import plain_file


def is_inside(name: str) -> bool:
    """Return whether the name of a file stays inside its folder, on every system.

    Args:
        name: The name, with forward slashes.

    Returns:
        False if it is absolute, has "..", a backslash or a drive letter, or is not in normal form.
    """
    # Compared with its normal form, which rejects "a//b", "./a" and "a/".
    segments = PurePosixPath(str(name)).parts
    plain = bool(segments) and PurePosixPath(*segments).as_posix() == name
    if not plain or name.startswith("/") or ".." in segments or "\\" in name or "\0" in name:
        return False
    # "C:x" is a plain name for POSIX and a drive for Windows, where checkpoints may be read too.
    return not any(PureWindowsPath(item).drive for item in segments)


def check_inside(name: str, source: Path) -> None:
    """Check that a name does not lead out of its folder.

    Args:
        name: The name, with forward slashes.
        source: The file that it comes from, for the message.

    Raises:
        CorruptCheckpointError: If it does; see `is_inside`.
    """
    if not is_inside(name):
        raise CorruptCheckpointError(
            f"{source} names the file {name!r}, which is not inside its folder. Do not use it."
        )


def listed_file(folder: Path, name: str, source: Path) -> Path:
    """Find a file that an index of weights names.

    Args:
        folder: The folder of the index.
        name: The file's path inside the folder.
        source: The index, for messages.

    Returns:
        The file's path.

    Raises:
        CorruptCheckpointError: If the name leads out of the folder, or it is a link or a special file. Links
            into the `blobs` folder of a hub's download cache, where snapshots keep their files, are followed.
        FileNotFoundError: If it does not exist.
    """
    check_inside(name, source)
    path = folder / name
    # Before plain_file, which rejects all links.
    if path.is_symlink() and _is_blob(folder, path.resolve()):
        return path
    try:
        return plain_file(folder, name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{source} names {name}, and {folder} has no such file. Download or copy the folder again."
        ) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{source}: {error}. Put the file itself there, if you trust it."
        ) from error


def _is_blob(folder: Path, target: Path) -> bool:
    """Whether a link stays in the cache: snapshots/<revision>/<file> points to blobs/<hash>."""
    snapshot = folder.resolve()
    if snapshot.parent.name != "snapshots" or target.parent != snapshot.parent.parent / "blobs":
        return False
    return target.exists() and stat.S_ISREG(target.stat().st_mode)
