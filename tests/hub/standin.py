"""A stand-in for the Hub over HTTP on loopback, for the real huggingface_hub client: repos, branches, commits, LFS.

It keeps what the Hub keeps (files of every commit, large files by sha256) and answers with its headers and error
codes. `fail` plants faults: a status, or a connection cut in the middle of a request or an answer.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_standin"
LARGE = (".safetensors", ".pt")


def blob_id(content: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """Files of every commit, and where branches, tags and pull requests point."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], ref: str, message: str = "") -> str:
        text = repr(sorted((path, blob_id(content)) for path, content in files.items())) + str(len(self.commits))
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid], self.refs[ref] = dict(files), oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    """The stand-in's state."""

    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    faults: list[tuple[str, re.Pattern[str], Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def fail(self, method: str, path: str, how: Any, times: int = 100) -> None:
        """Answer matching requests with a status, "cut" them or "half" of the answer, or "corrupt" what is stored."""
        self.faults += [(method, re.compile(path), how)] * times

    def fault(self, method: str, path: str) -> Any:
        for number, (kind, pattern, how) in enumerate(self.faults):
            if kind == method and pattern.search(path):
                del self.faults[number]
                return how
        return None

    def add(self, repo_id: str, files: dict[str, bytes], private: bool = False) -> Repo:
        """Put a repo with one commit on main."""
        self.repos[repo_id] = Repo(private)
        self.repos[repo_id].commit(files, "main")
        return self.repos[repo_id]


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """Serve a fresh stand-in on a free port of loopback."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """The Hub's routes, as far as the client asks them."""

    hub: Hub
    half = False
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""

    def answer(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.half and self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str, message: str) -> None:
        self.answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        how = self.hub.fault(self.command, path)
        if how == "cut":
            self.rfile.read(min(64, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.half = how == "half"
        body = self.body() if self.command in ("POST", "PUT", "DELETE") else b""
        if isinstance(how, int):
            self.refuse(how, "", f"planted {how}")
        elif self.command in ("POST", "PUT") and not path.endswith("/validate-yaml") and not self.may_write(path):
            self.refuse(401, "", "Invalid username or password.")
        else:
            self.route(path, parse_qs(urlsplit(self.path).query), body, how)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def may_write(self, path: str) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/large/")

    def route(self, path: str, query: dict[str, list[str]], body: bytes, how: Any) -> None:
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/large/(\w+)", path):
            content = body if how != "corrupt" else body[:-1] + b"?"
            self.hub.large[match[1]] = content
            return self.answer(200)
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.answer(
                200, {"transfer": "basic", "objects": [self.slot(o) for o in json.loads(body)["objects"]]}
            )
        match = re.fullmatch(
            r"(?:/api/models)?/([^/]+/[^/]+?)(?:/(resolve|revision|tree|preupload|commit|branch)/(.+))?", path
        )
        if match is None:
            return self.refuse(404, "", f"no such route: {path}")
        repo = self.hub.repos.get(match[1])
        if repo is None or (repo.private and not self.may_write(path)):
            return self.refuse(
                404 if repo is None and self.may_write(path) else 401, "RepoNotFound", "Repository not found"
            )
        verb, rest = match[2] or "revision", match[3] or "main"
        return getattr(self, f"on_{verb}")(match[1], repo, rest, query, body)

    def create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or "user"
        repo_id = f"{owner}/{asked['name']}"
        if repo_id in self.hub.repos:
            return self.answer(
                409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}
            )
        self.hub.repos[repo_id] = Repo(private=bool(asked.get("private") or asked.get("visibility") == "private"))
        self.hub.repos[repo_id].commit({}, "main", "initial commit")
        return self.answer(200, {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id})

    def slot(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = asked["oid"] in self.hub.large
        upload = {"upload": {"href": f"{self.hub.url}/large/{asked['oid']}", "header": {}}}
        return asked | ({} if known else {"actions": upload})

    def at(self, repo: Repo, revision: str) -> dict[str, bytes] | None:
        oid = repo.resolve(revision)
        if oid is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repo.commits[oid]

    def on_revision(self, repo_id: str, repo: Repo, revision: str, query: Any, body: bytes) -> None:
        files = self.at(repo, revision)
        if files is not None:
            siblings = [{"rfilename": path} for path in files]
            info = {
                "id": repo_id,
                "sha": repo.resolve(revision),
                "siblings": siblings,
                "private": repo.private,
                "tags": [],
            }
            self.answer(200, info)

    def on_tree(self, repo_id: str, repo: Repo, revision: str, query: Any, body: bytes) -> None:
        files = self.at(repo, revision)
        if files is not None:
            self.answer(200, [entry(path, content) for path, content in sorted(files.items())])

    def on_preupload(self, repo_id: str, repo: Repo, revision: str, query: Any, body: bytes) -> None:
        files = self.at(repo, revision)
        if files is None:
            return
        answers = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            mode = "lfs" if path.endswith(LARGE) else "regular"
            oid = blob_id(files[path]) if path in files and mode == "regular" else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": answers})

    def on_branch(self, repo_id: str, repo: Repo, branch: str, query: Any, body: bytes) -> None:
        if branch in repo.refs:
            return self.answer(409, {"error": "Reference already exists"})
        repo.refs[branch] = repo.refs["main"]
        return self.answer(201, {})

    def on_commit(self, repo_id: str, repo: Repo, revision: str, query: Any, body: bytes) -> None:
        files = self.at(repo, revision)
        if files is None:
            return None
        files, message = dict(files), ""
        for line in body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, repo.resolve(revision)):
                    return self.refuse(412, "", "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
        ref = f"refs/pr/{number}" if query.get("create_pr") else revision
        oid = repo.commit(files, ref, message)
        answer = {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid, "success": True}
        if query.get("create_pr"):
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo_id}/discussions/{number}"
        return self.answer(200, answer)

    def on_resolve(self, repo_id: str, repo: Repo, rest: str, query: Any, body: bytes) -> None:
        revision = next((ref for ref in sorted(repo.refs, key=len, reverse=True) if rest.startswith(f"{ref}/")), None)
        revision, _, path = rest.partition("/") if revision is None else (revision, "", rest[len(revision) + 1 :])
        files = self.at(repo, revision)
        if files is None:
            return
        if path not in files:
            return self.refuse(404, "EntryNotFound", f"Entry not found: {path}")
        content = files[path]
        etag = hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else blob_id(content)
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": str(repo.resolve(revision)),
            "Content-Length": str(len(content)),
        }
        if path.endswith(LARGE):
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
        return self.answer(200, content, headers)


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file of a tree listing."""
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
    if path.endswith(LARGE):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found
