"""Arrays of a tensor's memory. NumPy and torch are optional, so they are imported on use."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from springtide._artifact import Tensor

# What NumPy lacks: an integer dtype of the same width, and torch's name of the dtype.
TORCH_ONLY = {
    "BF16": ("int16", "bfloat16"),
    "F8_E4M3": ("uint8", "float8_e4m3fn"),
    "F8_E5M2": ("uint8", "float8_e5m2"),
    "F8_E8M0": ("uint8", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("uint8", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("uint8", "float8_e5m2fnuz"),
}


# What both have.
BOTH = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "U8": "uint8",
    "BOOL": "bool",
}


def torch_dtype(name: str) -> Any:
    """Torch's dtype of a checkpoint's. Raises `ArtifactError` if it has none."""
    import torch

    from springtide._artifact import ArtifactError

    _, ours = TORCH_ONLY.get(name, (None, BOTH.get(name)))
    if ours is None:
        raise ArtifactError(f"torch has no dtype {name}")
    return getattr(torch, ours)


def to_numpy(tensor: Tensor) -> npt.NDArray[np.generic]:
    """`Tensor.numpy`."""
    import numpy as np

    return np.asarray(tensor)


def to_torch(tensor: Tensor) -> Any:
    """`Tensor.torch`."""
    import torch

    array = to_numpy(tensor)
    of_same_width, name = TORCH_ONLY.get(tensor.dtype, (None, None))
    if of_same_width is not None:
        array = array.view(of_same_width)
    with warnings.catch_warnings():
        # torch warns that it could write to the array; the documentation of `Tensor.torch` says so
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        made = torch.from_numpy(array)
    return made if name is None else made.view(getattr(torch, name))
