"""Publish a head on the Hub: check it, render its card, and send what changed in one commit.

    publish("user/smollm2-eagle3", "head/", license="apache-2.0")

One commit or none: nothing is ever half-published, and a second call sends only what differs. The card is ours and is
sent as a file like the others; the library's own template never touches it. Called by `spechead publish`.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from .card import CARD, RESULTS, render_card
from .checks import WEIGHTS, check_head
from .hub_errors import FAILURES, PublishError, explain
from .provenance import PROMPTS_FILE, RECIPE_FILE
from .remote_state import Difference, RemoteFiles, files_of, lines_of, same

CODE = Path(__file__).with_name("custom_generate")
PLACEHOLDER = "<repo_id>"


@dataclass(frozen=True)
class PublishReport:
    """What was, or would be, published.

    Attributes:
        repo_id: The repo.
        folder: The folder that was compared with it; gone after a real publication unless `output` was given.
        files: The folder's files.
        difference: What differed; None where the repo could not be asked (dry run).
        lines: The difference as text.
        notes: What the publisher should know.
        url: Of the commit or pull request; None where nothing was sent.
        commit: Its hash; None where nothing was sent.
        revision: Branch or pull request that holds it, where that is not the main branch.
    """

    repo_id: str
    folder: Path
    files: tuple[str, ...]
    difference: Difference | None
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    url: str | None = None
    commit: str | None = None
    revision: str | None = None


def publish(
    repo_id: str,
    head_dir: str | Path,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    target: str | None = None,
    certificate: str | Path | None = None,
    allow_unmeasured: bool = False,
    dry_run: bool = False,
    output: str | Path | None = None,
) -> PublishReport:
    """Publish a head's directory; arguments that huggingface_hub has mean what they mean there.

    Args:
        repo_id: <user>/<name>; created where it does not exist.
        head_dir: The head's directory: config.json, model.safetensors, results.json, recipe.yaml.
        private: Whether a new repo is private; None = the account's default. An existing repo stays as it is.
        revision: Branch to commit to, created where it does not exist.
        token: Hub token; None = HF_TOKEN or the stored login.
        create_pr: Open a pull request instead of committing to the branch.
        commit_message: Of the commit.
        license: Licence identifier for the card; None = what README.md in the directory says.
        datasets: Hub datasets for the card; None = README.md's, else the recipe's.
        target: The target to compare the head with; None = the config's, if it is on this machine.
        certificate: What `spechead verify` wrote; None = verify.json in the directory.
        allow_unmeasured: Publish without results or certificate; the card says so.
        dry_run: Write the folder, compare it with the repo if that can be reached, and send nothing.
        output: Where the folder is written and kept; needed with `dry_run`.

    Returns:
        The report.

    Raises:
        ValueError: If a check fails, before the Hub is asked for anything.
        PublishError: If the Hub refuses or cannot be reached; it says what is, and is not, published.
    """
    require_repo_id(repo_id)
    if dry_run and output is None:
        raise ValueError("A dry run writes the folder that would be sent; say where (--output).")
    directory = Path(head_dir).expanduser()
    proof = None if certificate is None else Path(certificate)
    notes = check_head(directory, target=target, certificate=proof, allow_unmeasured=allow_unmeasured, token=token)
    card = render_card(directory, repo_id, license=license, datasets=datasets)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(directory, card, repo_id, Path(temporary) / "folder" if output is None else Path(output))
        if dry_run:
            return compare_only(api, repo_id, folder, revision, notes)
        sender = Sender(api, repo_id, private=private, revision=revision, create_pr=create_pr)
        return sender.send(folder, notes, commit_message)


def require_repo_id(repo_id: str) -> None:
    """Raise ValueError if it is no repo id."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no repo id: {error}") from error


def write_folder(directory: Path, card: str, repo_id: str, folder: Path) -> Path:
    """Write exactly what is published; what else lay in the folder is refused.

    Raises:
        ValueError: If the folder holds files that are not part of a published head.
    """
    code = {f"custom_generate/{file.name}": file for file in sorted(CODE.glob("*")) if file.suffix in (".py", ".txt")}
    plain = [
        name for name in ("config.json", WEIGHTS, RESULTS, RECIPE_FILE, PROMPTS_FILE) if (directory / name).is_file()
    ]
    allowed = {CARD, *plain, *code}
    strangers = sorted(set(files_of(folder)) - allowed) if folder.is_dir() else []
    if strangers:
        raise ValueError(f"{folder} holds {', '.join(strangers)}; give an empty or new directory (--output).")
    (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
    for name in plain:
        if (directory / name).resolve() != (folder / name).resolve():
            shutil.copyfile(directory / name, folder / name)
    for name, file in code.items():
        (folder / name).write_text(file.read_text(encoding="utf-8").replace(PLACEHOLDER, repo_id), encoding="utf-8")
    (folder / CARD).write_text(card, encoding="utf-8")
    return folder


def compare_only(api: HfApi, repo_id: str, folder: Path, revision: str | None, notes: list[str]) -> PublishReport:
    """Return the report of a dry run; a repo that cannot be asked is a note."""
    difference: Difference | None = None
    lines: tuple[str, ...] = ()
    try:
        difference = RemoteFiles.read(api, repo_id, revision).compare(folder)
        lines = tuple(lines_of(difference, folder, api, repo_id))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        difference = RemoteFiles().compare(folder)
        lines = tuple(lines_of(difference, folder, api, repo_id))
        notes = [*notes, f"There is no {repo_id}{f' at {revision}' if revision else ''} that this token can see yet."]
    except FAILURES as error:
        notes = [*notes, f"{repo_id} was not compared: {explain(error)}"]
    return PublishReport(repo_id, folder, tuple(files_of(folder)), difference, lines, tuple(notes))


class Sender:
    """Sends a folder to a repo in one commit.

    Args:
        api: The client.
        repo_id: The repo.
        private: Whether a new repo is private.
        revision: Branch to commit to.
        create_pr: Open a pull request instead.
    """

    def __init__(self, api: HfApi, repo_id: str, *, private: bool | None, revision: str | None, create_pr: bool):
        self.api, self.repo_id = api, repo_id
        self.private, self.revision, self.create_pr = private, revision, create_pr

    def send(self, folder: Path, notes: list[str], message: str | None) -> PublishReport:
        """Create what is missing, compare, commit what differs, and check what arrived.

        Raises:
            PublishError: If the Hub refuses or cannot be reached.
        """
        files = tuple(files_of(folder))
        stage = "nothing was published"
        try:
            remote = self.prepare()
            difference = remote.compare(folder)
            lines = tuple(lines_of(difference, folder, self.api, self.repo_id))
            if difference.empty:
                notes = [*notes, "The repo already holds exactly this; nothing was sent."]
                return PublishReport(self.repo_id, folder, files, difference, lines, tuple(notes))
            stage = "the commit is there whole or not at all, and the same command sends what is missing"
            commit = self.commit(folder, difference, message)
            stage = "the commit was made, but could not be read back"
            wrong = self.damaged(folder, commit.oid)
        except FAILURES as error:
            raise PublishError(f"{explain(error)} For {self.repo_id}: {stage}.") from error
        if wrong:
            raise PublishError(
                f"{self.repo_id} at {commit.oid} does not hold what was sent: {', '.join(wrong)}. Publish again."
            )
        url = commit.pr_url or commit.commit_url
        where = commit.pr_revision or self.revision
        return PublishReport(self.repo_id, folder, files, difference, lines, tuple(notes), url, commit.oid, where)

    def prepare(self) -> RemoteFiles:
        """Return the files of the branch, creating repo and branch where they are missing."""
        try:
            return RemoteFiles.read(self.api, self.repo_id, self.revision)
        except RevisionNotFoundError:
            if not self.create_pr:
                self.api.create_branch(self.repo_id, branch=str(self.revision), exist_ok=True)
        except RepositoryNotFoundError:
            self.api.create_repo(self.repo_id, private=self.private, exist_ok=True)
            if self.revision is not None and not self.create_pr:
                self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
        return RemoteFiles.read(self.api, self.repo_id, self.revision)

    def commit(self, folder: Path, difference: Difference, message: str | None) -> CommitInfo:
        """Commit the difference in one request, on top of the commit that was compared with."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=folder / path)
            for path in (*difference.added, *difference.changed)
        ]
        operations += [CommitOperationDelete(path_in_repo=path) for path in difference.removed]
        return self.api.create_commit(
            self.repo_id,
            operations,
            commit_message=message or "Publish head with spechead",
            revision=self.revision,
            create_pr=self.create_pr,
            parent_commit=difference.commit,
        )

    def damaged(self, folder: Path, commit: str) -> list[str]:
        """Return the files that the commit holds otherwise than the folder."""
        remote = RemoteFiles.read(self.api, self.repo_id, commit).files
        return [path for path in files_of(folder) if path not in remote or not same(remote[path], folder / path)]
