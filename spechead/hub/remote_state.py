"""What a Hub repo holds against what a folder holds: which files to send, which to remove, and the lines that differ.

Files are compared by their hashes, as the Hub lists them: git's for small files, sha256 for large ones. Called by
publish.py.
"""

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

TEXT = (".json", ".md", ".py", ".txt", ".yaml")
MAX_TEXT = 4 * 2**20  # larger ones are named, not shown


@dataclass(frozen=True)
class Difference:
    """Where a folder and a repo differ.

    Attributes:
        added, changed, removed: Paths to send for the first time, to send again, and to remove from the repo.
        kept: Paths that are equal.
        commit: The commit that was compared with; None = there was none.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    commit: str | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing has to be sent."""
        return not (self.added or self.changed or self.removed)


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a repo at a commit: path to entry."""

    commit: str | None = None
    files: dict[str, RepoFile] = field(default_factory=dict)

    @classmethod
    def read(cls, api: HfApi, repo_id: str, revision: str | None) -> "RemoteFiles":
        """List a repo's files.

        Args:
            api: The client.
            repo_id: The repo.
            revision: Branch, tag or commit.
        """
        commit = api.repo_info(repo_id, revision=revision).sha
        entries = api.list_repo_tree(repo_id, recursive=True, revision=commit)
        return cls(commit, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)})

    def compare(self, folder: Path) -> Difference:
        """Compare a folder with the repo; weights that the folder no longer has are removed, other files stay."""
        local = files_of(folder)
        added = tuple(path for path in local if path not in self.files)
        changed = tuple(path for path in local if path in self.files and not same(self.files[path], folder / path))
        stale = tuple(path for path in sorted(self.files) if is_weights(path) and path not in local)
        kept = tuple(path for path in local if path not in added + changed)
        return Difference(added, changed, stale, kept, self.commit)


def files_of(folder: Path) -> list[str]:
    """Return a folder's files as repo paths, sorted."""
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def is_weights(path: str) -> bool:
    """Whether a file would be read as weights of the head: stale ones beside new ones break loading."""
    return "/" not in path and path.endswith((".safetensors", ".safetensors.index.json"))


def same(entry: RepoFile, file: Path) -> bool:
    """Whether a file of a repo has the content of a local one."""
    if entry.size != file.stat().st_size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == digest(file, hashlib.sha256())
    header = f"blob {file.stat().st_size}\0".encode()
    return entry.blob_id == digest(file, hashlib.sha1(header, usedforsecurity=False))


def digest(file: Path, state: "hashlib._Hash") -> str:
    """Return the hash of a file's content after what a hash has already seen."""
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def lines_of(difference: Difference, folder: Path, api: HfApi, repo_id: str) -> Iterator[str]:
    """Yield the difference as text: a line a file, and a unified diff of each changed text file.

    Args:
        difference: What differs.
        folder: The local folder.
        api: The client; changed text files are downloaded from the commit that was compared with.
        repo_id: The repo.
    """
    for path in difference.added:
        yield f"+ {path} ({(folder / path).stat().st_size} bytes)"
    for path in difference.removed:
        yield f"- {path}"
    for path in difference.changed:
        yield f"~ {path} ({(folder / path).stat().st_size} bytes)"
        if path.endswith(TEXT) and (folder / path).stat().st_size <= MAX_TEXT:
            there = Path(api.hf_hub_download(repo_id, path, revision=difference.commit))
            # What lies there may be anybody's; to show it must not stop what replaces it.
            old, new = (file.read_text(encoding="utf-8", errors="replace") for file in (there, folder / path))
            names = (f"{repo_id}/{path}", f"local/{path}")
            for line in difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="", n=2):
                yield f"    {line}"
    for path in difference.kept:
        yield f"= {path}"
