from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

class ArtifactError(ValueError):
    """A checkpoint, patch or delta was refused. The message says why, and what to do."""

class Tensor:
    """A tensor whose bytes do not change. Arrays made of it share its memory and keep it alive."""

    @staticmethod
    def from_bytes(dtype: str, shape: list[int], bytes: bytes, /) -> Tensor:
        """A copy of the bytes of all values, row-major and little-endian."""
    @property
    def dtype(self) -> str:
        """The dtype's name, as in safetensors: `BF16`, `F32`, …"""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def digest(self) -> str:
        """BLAKE3 of the bytes, in hex."""
    def numpy(self) -> npt.NDArray[np.generic]:
        """A read-only array of the tensor's memory.

        NumPy has no bfloat16 and no 8-bit floats: their bits come as unsigned integers of the same
        width. Values narrower than a byte come as a row of bytes.
        """
    def torch(self) -> Any:
        """A `torch.Tensor` of the tensor's memory, in its own dtype.

        torch cannot make it read-only: never write to it.
        """

class Checkpoint:
    """All bytes of one version: tensors in Hugging Face coordinates, and the files beside them."""

    @staticmethod
    def open(folder: str | PathLike[str]) -> Checkpoint:
        """Maps a Hugging Face folder into memory.

        Nobody may change its files while tensors of it are in use; to replace a folder, rename
        another one over it.
        """
    def root(self, *, threads: int | None = None) -> str:
        """The content hash, in hex. Hashes all bytes, once, on `threads` threads (all, if None)."""
    def verify(self, root: str, *, threads: int | None = None) -> None:
        """Raises `ArtifactError` unless the content hash is `root`."""
    def apply_delta(self, delta: bytes, *, threads: int | None = None) -> Checkpoint:
        """The version that a delta makes of this one: decoded, and verified to the last byte.

        Tensors that stay as they are share this one's memory.
        """
    def delta_to(self, result: Checkpoint, *, threads: int | None = None) -> bytes:
        """The delta from this version to another, as the trainer publishes it."""
    def save(self, folder: str | PathLike[str]) -> None:
        """Writes a Hugging Face folder; each file atomically."""
    @property
    def files(self) -> dict[str, bytes]:
        """`config.json`, `tokenizer.json`, … by name. Each access copies them."""
    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
    def keys(self) -> list[str]:
        """Names of all tensors, in order."""
    def __getitem__(self, name: str, /) -> Tensor: ...
    def __contains__(self, name: str, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...

class Changes:
    """The weights of one tensor that change."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
    @property
    def indices(self) -> Tensor:
        """Where: I64 `[k]`, flat, ascending."""
    @property
    def values(self) -> Tensor:
        """What is there now: `[k]`, in the tensor's dtype."""
    def __len__(self) -> int: ...

class Patch:
    """A checked patch, in memory: nobody else can change it."""

    @staticmethod
    def read(path: str | PathLike[str]) -> Patch:
        """Reads a file and checks all of it: format, digest, and every index."""
    @staticmethod
    def from_bytes(file: bytes) -> Patch:
        """The same of the bytes of a file."""
    def of_worker(self, parts: str, /) -> bytes:
        """The bytes of the patch of one worker of an engine. `parts`: what it holds, as JSON."""
    @staticmethod
    def between(old: Checkpoint, new: Checkpoint) -> Patch:
        """The weights in which `new` differs from `old`.

        Raises `ArtifactError` if they have different tensors or another `config.json`.
        """
    def write(self, path: str | PathLike[str]) -> None:
        """Writes the patch to a file, atomically."""
    def to_bytes(self) -> bytes:
        """The bytes of the file."""
    @property
    def from_root(self) -> str:
        """Content hash of the version that it applies to, in hex."""
    @property
    def to_root(self) -> str:
        """Content hash of the version that it makes, in hex."""
    @property
    def weights(self) -> int:
        """Number of weights that it changes."""
    def keys(self) -> list[str]:
        """Names of the tensors that change, in order."""
    def __getitem__(self, name: str, /) -> Changes: ...
    def __contains__(self, name: str, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
