"""What the plugins for engines share: new weights are read and checked before any is written."""

from __future__ import annotations

import os

from springtide._artifact import ArtifactError, Checkpoint, Patch


def stage_patch(
    path: str | os.PathLike[str],
    holds: str | None,
    start: str | None = None,
    end: str | None = None,
) -> Patch:
    """Reads the patch that an engine with the version `holds` (None: unknown) is to apply.

    `start` and `end` are what the patch should lead from and to, if the caller says so. Versions
    are content hashes in hex. Raises `ArtifactError` or `OSError`; then nothing has changed.
    """
    if start is not None and start != holds:
        # before the file is read: the caller may have removed it
        raise _other_version(holds, start)
    patch = Patch.read(path)
    if start not in (None, patch.from_root) or end not in (None, patch.to_root):
        raise ArtifactError(f"{path} leads from {patch.from_root} to {patch.to_root}, not from {start} to {end}")
    if patch.from_root != holds:
        raise _other_version(holds, patch.from_root)
    return patch


def stage_folder(path: str | os.PathLike[str], end: str | None = None) -> Checkpoint:
    """Opens a folder of all weights, and checks its content hash if the caller names it.

    Raises `ArtifactError` or `OSError`; then nothing has changed.
    """
    checkpoint = Checkpoint.open(path)
    if end is not None:
        checkpoint.verify(end)
    return checkpoint


def _other_version(holds: str | None, start: str) -> ArtifactError:
    return ArtifactError(f"the server holds version {holds}, and the patch starts from {start}: load a folder first")
