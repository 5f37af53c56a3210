"""Pickle files of arrays and lists, as FedBN's archives hold them, read without running what else a pickle may hold."""

import pickle
from pathlib import Path
from typing import Any

from fedbn_flwr.data.sets.listing import DataFilesError, require

#: what a pickle of NumPy arrays, numbers and text refers to
ALLOWED = {
    ("_codecs", "encode"),
    *(
        (f"{package}.multiarray", name)
        for package in ("numpy.core", "numpy._core")
        for name in ("_reconstruct", "scalar")
    ),
    *((f"{package}.numeric", "_frombuffer") for package in ("numpy.core", "numpy._core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return super().find_class(module, name)


def read_pair(path: Path, what: str) -> tuple[Any, Any]:
    """Return the two columns of a pickle file, images (or paths) and labels."""
    with require(path, what).open("rb") as file:
        try:
            first, second = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise DataFilesError(f"{path} is not a pickle file of images and labels: {reason}") from None
    if len(first) != len(second):
        raise DataFilesError(f"{path} has {len(first)} images and {len(second)} labels")
    return first, second
