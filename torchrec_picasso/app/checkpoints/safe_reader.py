"""Reads torch.distributed.checkpoint's format without running code from its files.

torch unpickles a checkpoint's metadata and its values other than tensors without restriction. Here
metadata may only name its own classes, and values pass ``torch.load(..., weights_only=True)``.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

_METADATA_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)


def load_safely(path: Path, state: dict[str, Any], *, no_dist: bool = False) -> None:
    """``torch.distributed.checkpoint.load`` of a complete checkpoint into ``state``, in place.

    Collective, unless ``no_dist``.
    """
    reader, planner = SafeReader(path), _SafePlanner()
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=no_dist)


class SafeReader(FileSystemReader):
    """torch's file reader with restricted metadata."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata_file = path / ".metadata"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata; raises UnpicklingError if it names another class or function."""
        with self._metadata_file.open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"a {type(found).__name__} instead of metadata")
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("Path", "PosixPath", "WindowsPath"):
            return pathlib.Path
        if (module, name) not in _METADATA_CLASSES:
            raise pickle.UnpicklingError(f"metadata names {module}.{name}, which it must not")
        return super().find_class(module, name)


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises if the pickle names anything unsafe
        value.seek(0)
        super().load_bytes(read_item, value)
