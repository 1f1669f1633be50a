"""Kept versions: weights of a run's versions that stay on disk, so that its samples can be verified afterwards.

    RUN/versions/DIGEST.version
        8 bytes "UNISONK1" · header length (u64) · header (JSON) · two zlib streams per tensor · xxh3-128 of all before

A version is kept as the XOR of its bytes with those of the version kept before it (`base` in the header), or as itself
where there is none: one stream says which elements aren't zero, one bit each, the other what they are, all low bytes
first. XOR is its own inverse, so a chain can be walked both ways: from the model's directory, from any checkpoint, or
from a file that has no base. What is rebuilt is compared with the digest of each tensor and of the whole (V1). A file
is complete or not there: temporary name, fsync, rename.

Owns: the format, and the rule which versions are kept. Called by the training loop (`VersionKeeper`) and by bin/verify.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, uint8

from ...engine.config import available_cores
from ...engine.models.layout import WeightLayout
from ...ipc.errors import CheckpointError
from ...ipc.types import Manifest, PolicyVersion, TensorEntry
from .checkpoint import TEMPORARY, sync

FOLDER, SUFFIX = "versions", ".version"
MAGIC = b"UNISONK1"
LEVEL = 1
"""Of zlib: higher levels take several times as long for some percent."""
DIGEST_BYTES = 16
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 28
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}

Arrays = Mapping[str, np.ndarray]
"""Bytes of each tensor by Hugging Face name, uint8 [bytes]; aliases left out."""


class DamagedVersionError(CheckpointError):
    """A kept version isn't what its digests say; `tensor` names the place where there is one."""

    def __init__(self, path: Path, what: str, tensor: str = "") -> None:
        super().__init__(f"{path} is damaged: {what}")
        self.path = path
        self.tensor = tensor


@dataclass(frozen=True)
class KeptVersion:
    """What one file says of itself."""

    path: Path
    """The file."""
    ordinal: int
    """The version when it was kept; a resumed run may give the same weights another one."""
    step: int
    """The step that made it."""
    digest: str
    """Of its weights; also the file's name."""
    base: str | None
    """Digest of the weights that it is the difference to; None where it stands alone."""
    entries: tuple[TensorEntry, ...]
    """Its manifest."""
    sizes: tuple[tuple[int, int], ...]
    """Compressed bytes of the two streams of each tensor that is no alias, in the manifest's order."""

    @property
    def own(self) -> tuple[TensorEntry, ...]:
        """Entries that have bytes of their own."""
        return tuple(entry for entry in self.entries if entry.alias_of is None)


class VersionKeeper:
    """Keeps a run's versions as its rule asks. Life: built with what is live → `keep` after every step. One thread."""

    def __init__(self, run_dir: Path, interval: int, layout: WeightLayout) -> None:
        """`interval`: steps between two versions that are kept; 0 keeps none, and this object then does nothing."""
        self._folder = run_dir / FOLDER
        self._interval = interval
        self._layout = layout
        self._version: PolicyVersion | None = None
        self._previous: dict[str, np.ndarray] = {}

    def begin(self, version: PolicyVersion, tensors: Mapping[str, Tensor], is_first: bool) -> None:
        """What later versions are compared with: the live one. Where it can't be had from elsewhere, because it isn't
        the one that the run began with (`is_first`) and wasn't kept before, it is kept whole.

        Raises:
            CheckpointError: as `keep`.
        """
        if not self._interval:
            return
        arrays = arrays_of(self._layout, tensors)
        if not is_first and not path_of(self._folder, version.digest).exists():
            self._write(version, -1, arrays, None)
        self._remember(version, arrays)

    def keep(self, step: int, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> int:
        """Keep the version that a step made, if it is its turn; returns the bytes written.

        Raises:
            CheckpointError: the disk is full, or can't be written.
        """
        if not self._interval or step % self._interval:
            return 0
        arrays = arrays_of(self._layout, tensors)
        num_bytes = 0
        if self._version is not None and version.digest != self._version.digest:
            if not path_of(self._folder, version.digest).exists():  # a resumed run makes the same weights again
                num_bytes = self._write(version, step, arrays, self._version.digest)
            self._remember(version, arrays)
        return num_bytes

    def _remember(self, version: PolicyVersion, arrays: Arrays) -> None:
        self._version = version
        if not self._previous:
            self._previous = {name: array.copy() for name, array in arrays.items()}
        for name, array in arrays.items():
            np.copyto(self._previous[name], array)

    def _write(self, version: PolicyVersion, step: int, arrays: Arrays, base: str | None) -> int:
        width = self._layout.dtype.itemsize

        def packed(name: str) -> tuple[str, bytes, bytes]:
            array = arrays[name] if base is None else np.bitwise_xor(arrays[name], self._previous[name])
            return xxhash.xxh3_128_hexdigest(arrays[name].data), *_packed(array, width)

        names = sorted(self._layout.entries)
        with ThreadPoolExecutor(available_cores(), "keep") as pool:
            pieces = dict(zip(names, pool.map(packed, names), strict=True))
        dtype = str(self._layout.dtype).removeprefix("torch.")
        shapes = {name: entry.shape for name, entry in self._layout.entries.items()}
        entries = [TensorEntry(name, shapes[name], dtype, pieces[name][0]) for name in names]
        entries += [TensorEntry(alias, shapes[name], dtype, pieces[name][0], name)
                    for alias, name in self._layout.aliases.items()]  # fmt: skip
        manifest = Manifest.of(entries)
        if manifest.digest != version.digest:
            raise CheckpointError(f"the bytes of version {version.ordinal} have digest {manifest.digest}, not "
                                  f"{version.digest}: they changed while they were kept")  # fmt: skip
        header = {
            "ordinal": version.ordinal, "step": step, "digest": version.digest, "base": base, "dtype": dtype,
            "tensors": [[each.name, list(each.shape), each.digest, each.alias_of,
                         *([] if each.alias_of else map(len, pieces[each.name][1:]))] for each in manifest.entries],
        }  # fmt: skip
        streams = [part for each in manifest.entries if each.alias_of is None for part in pieces[each.name][1:]]
        return _write_file(path_of(self._folder, version.digest), json.dumps(header).encode(), streams)


def _packed(array: np.ndarray, width: int) -> tuple[bytes, bytes]:
    """Which elements aren't zero, and what those are: both streams."""
    elements = array.view(_UNSIGNED[width])
    is_set = elements != 0
    planes = np.ascontiguousarray(elements[is_set].view(np.uint8).reshape(-1, width).T)
    return zlib.compress(np.packbits(is_set).tobytes(), LEVEL), zlib.compress(planes.tobytes(), LEVEL)


def _xor_packed(streams: tuple[bytes, bytes], target: np.ndarray, width: int) -> None:
    """XOR what `_packed` made into a tensor's bytes. Raises ValueError, zlib.error where it can't be for that."""
    elements = target.view(_UNSIGNED[width])
    bits, planes = (np.frombuffer(zlib.decompress(stream), dtype=np.uint8) for stream in streams)
    if len(bits) != -(-len(elements) // 8):
        raise ValueError(f"{len(bits)} bytes of marks for {len(elements)} elements")
    is_set = np.unpackbits(bits, count=len(elements)).view(bool)
    values = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(_UNSIGNED[width])
    if len(values) != np.count_nonzero(is_set):
        raise ValueError(f"{len(values)} values for {np.count_nonzero(is_set)} marks")
    elements[is_set] ^= values


def arrays_of(layout: WeightLayout, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Bytes of each tensor of its own, without a copy."""
    return {name: tensors[name].detach().reshape(-1).view(uint8).numpy() for name in layout.entries}


def path_of(folder: Path, digest: str) -> Path:
    """Where a version with these weights is kept."""
    return folder / f"{digest}{SUFFIX}"


def kept_versions(run_dir: Path) -> tuple[list[KeptVersion], list[DamagedVersionError]]:
    """The files of a run whose headers can be read, and what is wrong with the others."""
    found, damaged = [], []
    for path in sorted((run_dir / FOLDER).glob(f"[!.]*{SUFFIX}")):
        try:
            found.append(read_header(path))
        except DamagedVersionError as error:
            damaged.append(error)
    return found, damaged


def read_header(path: Path) -> KeptVersion:
    """What a file says of itself, without its weights.

    Raises:
        DamagedVersionError: it can't be read, or its digest isn't that of the tensors that it lists.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + _LENGTH.size)
            if len(start) < len(MAGIC) + _LENGTH.size or not start.startswith(MAGIC):
                raise DamagedVersionError(path, "it is no kept version, or one of another format")
            (length,) = _LENGTH.unpack(start[len(MAGIC) :])
            values = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        dtype = values["dtype"]
        rows = values["tensors"]
        entries = tuple(TensorEntry(row[0], tuple(row[1]), dtype, row[2], row[3]) for row in rows)
        sizes = tuple((int(row[4]), int(row[5])) for row in rows if row[3] is None)
        found = KeptVersion(path, int(values["ordinal"]), int(values["step"]), str(values["digest"]),
                            values["base"], entries, sizes)  # fmt: skip
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DamagedVersionError(path, f"its header can't be read: {error!r}") from error
    if Manifest.of(entries).digest != found.digest or path.name != f"{found.digest}{SUFFIX}":
        raise DamagedVersionError(path, "its header isn't what its digest says")
    return found


def apply(kept: KeptVersion, arrays: Arrays) -> None:
    """XOR a file's content into `arrays`, in place: from its base to it, or from it to its base; from zeros to it where
    it stands alone.

    Raises:
        DamagedVersionError: the file is cut off, or a stream can't be read; `arrays` hold nothing of use then.
    """
    try:
        content = kept.path.read_bytes()
    except OSError as error:
        raise DamagedVersionError(kept.path, str(error)) from error
    place = len(MAGIC) + _LENGTH.size
    place += _LENGTH.unpack(content[len(MAGIC) : place])[0]
    work = []
    for entry, (num_marks, num_values) in zip(kept.own, kept.sizes, strict=True):
        end = place + num_marks + num_values
        work.append((entry.name, (content[place : place + num_marks], content[place + num_marks : end])))
        place = end
    width = _ITEM_BYTES[kept.own[0].dtype]

    def unpack(item: tuple[str, tuple[bytes, bytes]]) -> None:
        name, streams = item
        try:
            _xor_packed(streams, arrays[name], width)
        except (zlib.error, ValueError, KeyError) as error:
            raise DamagedVersionError(kept.path, f"{name} can't be read: {error}", name) from error

    with ThreadPoolExecutor(available_cores(), "rebuild") as pool:
        list(pool.map(unpack, work))
    if content[place:] != xxhash.xxh3_128_digest(content[:place]):
        raise DamagedVersionError(kept.path, "its digest isn't that of its bytes")


def _write_file(path: Path, header: bytes, streams: list[bytes]) -> int:
    """Under a temporary name first; visible by one rename, after everything is on the disk (rename(2), fsync(2))."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    digest = xxhash.xxh3_128()
    num_bytes = 0
    try:
        path.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            for piece in (MAGIC, _LENGTH.pack(len(header)), header, *streams):
                file.write(piece)
                digest.update(piece)
                num_bytes += len(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} can't be written: {error}; make room, or set checkpoint.keep_versions=none; go on with --resume"
        ) from error
    return num_bytes + DIGEST_BYTES
