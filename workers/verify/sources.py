"""WeightSources: any version's weights by their digest, from whatever still has them.

Sources are Hugging Face directories (the model that a run began with, its checkpoints) and the versions that a run has
kept, which are differences to others: the shortest way from something that is there is taken, in either direction.
Every weight set that comes out has the digest that was asked for, or doesn't come out (V1).

Owns: the sets in memory, at most `MAX_RESIDENT` or as many as one request needs, and what was found damaged. Called by
the verifier; one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...engine.models.layout import DecoderWeights, WeightLayout
from ...engine.models.loader import load_into
from ...ipc.errors import CheckpointError, UnisonError, WeightsError
from ...ipc.types import Manifest
from ..trainer.checkpoint import DIGESTS, checkpoints, read_state, verify
from ..trainer.kept import DamagedVersionError, KeptVersion, apply, arrays_of, kept_versions

MAX_RESIDENT = 3
"""Weight sets that stay in memory; consecutive versions are one difference apart."""


class MissingWeightsError(UnisonError):
    """Nothing has weights with this digest any more."""


class DamagedWeightsError(UnisonError):
    """What should have them isn't what its digests say."""


@dataclass(eq=False)
class _Directory:
    """One Hugging Face directory."""

    path: Path
    digest: str | None
    """What its weights are said to be; None until they were read."""


@dataclass(frozen=True, eq=False)
class _Resident:
    """One weight set in memory."""

    views: dict[str, Tensor]
    bound: DecoderWeights


class WeightSources:
    """Life: built with what there is → any number of `weights`."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout
        self._directories: list[_Directory] = []
        self._kept: dict[str, KeptVersion] = {}
        self._bad_directories: list[_Directory] = []
        self._bad_kept: dict[str, KeptVersion] = {}
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._failed: dict[str, UnisonError] = {}
        self.damaged: dict[str, str] = {}
        """What is wrong, by file; what was asked for may have come from elsewhere."""

    def add_directory(self, path: Path, digest: str | None = None) -> None:
        """A model's directory; `digest` is what its weights are said to be, None where nobody has said so."""
        self._directories.append(_Directory(path, digest))

    def add_run(self, run_dir: Path) -> None:
        """A run's checkpoints and kept versions."""
        for path in checkpoints(run_dir):
            try:
                self.add_directory(path, read_state(path).digest)
            except CheckpointError as error:
                self.damaged[str(path)] = str(error)
        found, damaged = kept_versions(run_dir)
        self._kept |= {kept.digest: kept for kept in found}
        self.damaged |= {str(error.path): str(error) for error in damaged}

    def prepare(self, digests: Iterable[str]) -> dict[str, DecoderWeights | UnisonError]:
        """All these weight sets at once, each bound, or why it can't be had. They stay until the next call."""
        wanted = list(dict.fromkeys(digests))
        found: dict[str, DecoderWeights | UnisonError] = {}
        for digest in wanted:
            if digest not in self._failed and digest not in self._resident:
                try:
                    self._make_room(wanted)
                    self._rebuild(digest)
                except UnisonError as error:
                    self._failed[digest] = error
            if digest in self._resident:
                self._resident.move_to_end(digest)
                found[digest] = self._resident[digest].bound
            else:
                found[digest] = self._failed[digest]
        return found

    def manifest(self, digest: str) -> Manifest:
        """Tensor by tensor, what a resident weight set is."""
        return self._layout.manifest(self._resident[digest].views)

    # ---- the way to a digest -----------------------------------------------------------------------------------------

    def _rebuild(self, digest: str) -> None:
        """Raise MissingWeightsError or DamagedWeightsError where every way is closed."""
        while True:
            way = self._way_to(digest)
            if way is None:
                break
            try:
                self._walk(*way)
                return
            except UnisonError:
                continue  # what was at fault is known now, and isn't gone through again
        closed = self._way_to(digest, with_bad=True)
        paths = [] if closed is None else [str(kept.path) for kept, _ in closed[1]]
        if closed is not None and isinstance(closed[0], _Directory):
            paths.append(str(closed[0].path))
        reasons = [text for path, text in self.damaged.items() if path in paths or digest in path]
        if reasons:
            raise DamagedWeightsError("; ".join(reasons))
        raise MissingWeightsError(f"no directory and no kept version has weights with digest {digest}")

    def _way_to(
        self, digest: str, with_bad: bool = False
    ) -> tuple[str | _Directory | None, list[tuple[KeptVersion, str]]] | None:
        """Where to begin (a resident digest, a directory, or nothing), and the differences to apply, each with the
        digest that it leads to; the fewest. Directories whose digest nobody knows are read when all else fails.
        `with_bad` goes through what was found damaged too."""
        every = self._kept | (self._bad_kept if with_bad else {})
        came_from: dict[str, tuple[KeptVersion, str] | None] = {digest: None}
        queue = deque([digest])
        while queue:
            here = queue.popleft()
            start = self._start_at(here, with_bad)
            kept = every.get(here)
            is_whole = kept is not None and kept.base is None
            if start is not None or is_whole:
                way = [] if start is not None or kept is None else [(kept, here)]
                while (step := came_from[here]) is not None:
                    way.append(step)
                    here = step[1]
                return start, way
            edges = [] if kept is None or kept.base is None else [(kept.base, kept)]
            edges += [(other.digest, other) for other in every.values() if other.base == here]
            for there, edge in edges:
                if there not in came_from:
                    came_from[there] = (edge, here)
                    queue.append(there)
        return self._way_to(digest, with_bad) if self._read_unknown() else None

    def _start_at(self, digest: str, with_bad: bool) -> str | _Directory | None:
        if digest in self._resident:
            return digest
        directories = self._directories + (self._bad_directories if with_bad else [])
        return next((each for each in directories if each.digest == digest), None)

    def _read_unknown(self) -> bool:
        """Find out what one more directory has; False where all are known."""
        unknown = next((each for each in self._directories if each.digest is None), None)
        if unknown is None:
            return False
        try:
            unknown.digest = self._layout.manifest(self._load(unknown.path)).digest
        except UnisonError as error:
            self._give_up(unknown, str(error))
        return True

    def _walk(self, start: str | _Directory | None, way: list[tuple[KeptVersion, str]]) -> None:
        if isinstance(start, _Directory):
            views = self._load_checked(start)
            here = start.digest or ""
        else:
            views = self._layout.views(self._layout.allocate())
            here = start or ""
            if start is not None:
                for name, source in self._resident[start].views.items():
                    views[name].copy_(source)
        for kept, digest in way:
            try:
                apply(kept, arrays_of(self._layout, views))
                self._check(kept, digest, views)
            except DamagedVersionError as error:
                self._kept.pop(kept.digest, None)
                self._bad_kept[kept.digest] = kept
                self.damaged[str(kept.path)] = str(error)
                raise
            here = digest
        self._resident[here] = _Resident(views, self._layout.bind(views))

    def _check(self, kept: KeptVersion, digest: str, views: Mapping[str, Tensor]) -> None:
        found = self._layout.manifest(views)
        if found.digest == digest:
            return
        known = self._kept.get(digest)
        differing = () if known is None else found.differing(Manifest.of(known.entries))
        raise DamagedVersionError(kept.path, f"it doesn't lead to digest {digest}: {', '.join(differing[:4])} differ",
                                  differing[0] if differing else "")  # fmt: skip

    # ---- directories -------------------------------------------------------------------------------------------------

    def _load_checked(self, directory: _Directory) -> dict[str, Tensor]:
        try:
            if (directory.path / DIGESTS).is_file():
                verify(directory.path)
            views = self._load(directory.path)
            found = self._layout.manifest(views).digest
            if found != directory.digest:
                raise DamagedWeightsError(
                    f"{directory.path} has weights with digest {found}, and is said to have {directory.digest}"
                )
        except UnisonError as error:
            self._give_up(directory, str(error))
            raise
        return views

    def _load(self, path: Path) -> dict[str, Tensor]:
        views = self._layout.views(self._layout.allocate())
        try:
            load_into(path, self._layout, views)
        except OSError as error:
            raise WeightsError(f"{path} can't be read: {error}") from error
        return views

    def _give_up(self, directory: _Directory, reason: str) -> None:
        self._directories.remove(directory)
        self._bad_directories.append(directory)
        self.damaged[str(directory.path)] = reason

    def _make_room(self, wanted: list[str]) -> None:
        """Let go of the sets that were used longest ago and aren't wanted now."""
        for digest in list(self._resident):
            if len(self._resident) < max(MAX_RESIDENT, len(wanted)):
                return
            if digest not in wanted:
                del self._resident[digest]
