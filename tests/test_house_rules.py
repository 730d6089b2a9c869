"""The house rules that a machine can hold; CONTRIBUTING.md names them.

Each rule is a function from sources to a list of faults. One test runs it over the repository, another shows that it
finds a planted fault, so that no rule can pass by looking at nothing.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from transformers import GenerationConfig, GenerationMixin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
Sources = dict[str, str]  # path relative to the repository -> text

MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
LAYERS = (
    {"tree", "proposal", "verify", "stats"},
    {"config", "sampling", "cache", "attention", "target", "hf", "support", "streamer", "fresh", "row", "context"},
    {"heads"},
    {"proposers"},
    {"decoding"},
    {"attach", "mixin"},
    {"training", "hub", "bench", "serving", "demo_target"},
    {"__init__"},
    {"cli", "__main__"},
)
SYNONYMS = {"verifier", "assistant", "drafter", "candidate", "candidates", "engine", "speculator"}
TRANSFORMERS_NAMES = set(GenerationConfig().to_dict()) | set(inspect.signature(GenerationMixin.generate).parameters)
# The server's engine has that name in serving/ and where the command starts it; in chat.py "assistant" is the role.
EXEMPT = {"engine": ("spechead/serving/", "spechead/cli/serve.py"), "assistant": ("spechead/training/chat.py",)}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|tmp|root)/\w")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
IMPORT_NAMES = {"pyyaml": "yaml", "prometheus-client": "prometheus_client"}


def read(*patterns: str) -> Sources:
    """The repository's files that match, by relative path."""
    found = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()})
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}


def code() -> Sources:
    return read("spechead/**/*.py", "recipes/**/*.py", "scripts/**/*.py")


def too_long(sources: Sources) -> list[str]:
    faults = []
    for path, text in sources.items():
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            faults.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}; split it by noun")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    faults.append(f"{path}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}")
    return faults


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: the bodies of `if TYPE_CHECKING:` are left out."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from runtime_nodes(child)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(path: str, text: str, modules: set[str]) -> set[str]:
    """The package's own modules that the file at `path` imports when it runs, also inside functions."""
    package = module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
    found = set()
    for node in runtime_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            inner = {f"{origin}.{name.name}" for name in node.names}
            found |= inner & modules
            if inner - modules:
                found.add(origin)
    return (found & modules) - {module_name(path)}


def layer(module: str) -> int:
    part = module.split(".")[1] if "." in module else "__init__"
    found = [index for index, names in enumerate(LAYERS) if part in names]
    if not found:
        raise AssertionError(f"{module} belongs to no layer; name it in LAYERS (DESIGN, section 3)")
    return found[0]


def wrong_imports(sources: Sources) -> list[str]:
    own = {path: text for path, text in sources.items() if path.startswith("spechead/")}
    modules = {module_name(path) for path in own}
    graph = {module_name(path): imports_of(path, text, modules) for path, text in own.items()}
    faults = [
        f"{module} imports {other}, which is of a higher layer"
        for module, others in graph.items()
        for other in sorted(others)
        if layer(other) > layer(module)
    ]
    if graph.get("spechead.demo_target"):
        faults.append("spechead.demo_target imports from the package; it must stand alone")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append("import cycle: " + " <- ".join(error.args[1]))
    return faults


def public_names(text: str) -> Iterator[tuple[int, str]]:
    """Classes, functions, their parameters and fields that do not start with an underscore, and constants."""

    def visit(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.lineno, node.name
                if not node.name.startswith("_") or node.name == "__init__":
                    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    yield from ((node.lineno, argument.arg) for argument in arguments)
            elif isinstance(node, ast.ClassDef):
                yield node.lineno, node.name
                if not node.name.startswith("_"):
                    yield from visit(node.body)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))

    yield from ((line, name) for line, name in visit(ast.parse(text).body) if not name.startswith("_"))


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def synonyms(sources: Sources) -> list[str]:
    faults = []
    for path, text in sources.items():
        allowed = {word for word, places in EXEMPT.items() if path.startswith(places)}
        for line, name in [(0, Path(path).stem), *public_names(text)]:
            if name not in TRANSFORMERS_NAMES and (bad := (words_of(name) & SYNONYMS) - allowed):
                faults.append(f"{path}:{line} {name}: DESIGN section 2 has another word for {', '.join(sorted(bad))}")
    return faults


def prints(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno} print"
        for path, text in sources.items()
        if not path.startswith(("spechead/cli/", "recipes/", "scripts/"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def matches(pattern: re.Pattern[str]) -> Callable[[Sources], list[str]]:
    def find(sources: Sources) -> list[str]:
        return [
            f"{path}:{number} {match.group()}"
            for path, text in sources.items()
            for number, line in enumerate(text.splitlines(), 1)
            if (match := pattern.search(line))
        ]

    return find


def undocumented(sources: Sources) -> list[str]:
    """Names of `spechead.__all__` that no page mentions."""
    tree = ast.parse(sources["spechead/__init__.py"])
    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    pages = "\n".join(text for path, text in sources.items() if path.endswith(".md"))
    names = [name for node in assigned for name in ast.literal_eval(node.value)]
    return [f"{name} is in no page" for name in names if not re.search(rf"\b{re.escape(name)}\b", pages)]


def undeclared(sources: Sources) -> list[str]:
    """Third-party imports of the package that pyproject.toml does not declare."""
    project = tomllib.loads(sources["pyproject.toml"])["project"]
    extras = project.get("optional-dependencies", {})
    requirements = [*project["dependencies"], *extras.get("serve", []), *extras.get("demo", [])]
    names = {re.split(r"[<>=!~;\[ ]", requirement)[0].lower() for requirement in requirements}
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names} | set(sys.stdlib_module_names)
    faults = []
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
            found = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found = [node.module or ""]
            tops = {name.split(".")[0] for name in found} - known - {"spechead", "recipes", "scripts"}
            faults += [f"{path}:{node.lineno} imports {top}, which pyproject.toml does not declare" for top in tops]  # type: ignore[attr-defined]
    return faults


PAGES = ("*.md", "docs/**/*.md", "spechead/**/*.md", "model_cards/**/*.md")
TEXTS = (*PAGES, "pyproject.toml", "Makefile", "spechead/**/*.py", "recipes/**/*", "scripts/**/*.py", "tests/**/*.py")
RULES: dict[str, tuple[Callable[[Sources], list[str]], Callable[[], Sources]]] = {
    "length": (too_long, code),
    "imports": (wrong_imports, code),
    "synonyms": (synonyms, code),
    "prints": (prints, code),
    "unfinished": (matches(UNFINISHED), code),
    "machine paths": (matches(MACHINE_PATH), lambda: read(*TEXTS)),
    "documented": (undocumented, lambda: read("spechead/__init__.py", "README.md", "docs/**/*.md")),
    "declared": (undeclared, lambda: read("spechead/**/*.py", "recipes/**/*.py", "pyproject.toml")),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_repository_keeps(rule: str) -> None:
    check, sources = RULES[rule]
    files = sources()
    assert files, "the rule looked at nothing"
    faults = check(files)
    assert not faults, "\n".join(faults)


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
CORE = {"spechead/verify.py": "", "spechead/cache.py": "", "spechead/__init__.py": ""}
PROJECT = '[project]\ndependencies = ["torch>=2"]\n'
FAULTS: list[tuple[str, Sources]] = [
    ("length", {"spechead/a.py": "x = 1\n" * (MAX_FILE_LINES + 1)}),
    ("length", {"spechead/a.py": LONG_FUNCTION}),
    ("imports", {**CORE, "spechead/verify.py": "from .cache import x"}),
    ("imports", {**CORE, "spechead/verify.py": "def f():\n    from spechead import cache"}),
    ("imports", {**CORE, "spechead/heads/load.py": "from ..mixin import x", "spechead/mixin.py": ""}),
    ("imports", {**CORE, "spechead/cache.py": "from . import hf", "spechead/hf.py": "from spechead.cache import x"}),
    ("imports", {**CORE, "spechead/demo_target.py": "from .verify import x"}),
    ("synonyms", {"spechead/a.py": "class TokenVerifier:\n    pass"}),
    ("synonyms", {"spechead/a.py": "def keep(candidate_tokens):\n    pass"}),
    ("synonyms", {"spechead/bench/engine.py": ""}),
    ("synonyms", {"spechead/drafter.py": ""}),
    ("prints", {"spechead/bench/a.py": "def f():\n    print(1)"}),
    ("unfinished", {"spechead/a.py": "# TO" + "DO later"}),
    ("machine paths", {"docs/a.md": "see /" + "work/main"}),
    ("documented", {"spechead/__init__.py": '__all__ = ["verify"]', "README.md": "verifying is something else"}),
    ("declared", {"spechead/a.py": "import torch, httpx", "pyproject.toml": PROJECT}),
]


@pytest.mark.parametrize(("rule", "sources"), FAULTS)
def test_a_planted_fault_is_found(rule: str, sources: Sources) -> None:
    assert len(RULES[rule][0](sources)) == 1


INNOCENT: list[tuple[str, Sources]] = [
    ("length", {"spechead/a.py": "x = 1\n" * MAX_FILE_LINES}),
    ("imports", {**CORE, "spechead/verify.py": "if TYPE_CHECKING:\n    from .cache import x"}),
    ("imports", {**CORE, "spechead/cache.py": "from .verify import x"}),
    ("synonyms", {"spechead/a.py": "def f(assistant_model, verify, engineering, _drafter=1):\n    candidate = 1"}),
    ("synonyms", {"spechead/serving/engine.py": "class Engine:\n    pass"}),
    ("synonyms", {"spechead/hub/speculators.py": "# the package of that name"}),
    ("prints", {"spechead/cli/a.py": "print(1)", "spechead/a.py": "console.print(1)"}),
    ("machine paths", {"docs/a.md": "see models/tmp/x and https://x.org/work/y"}),
    ("documented", {"spechead/__init__.py": '__all__ = ["verify"]', "README.md": "`verify` keeps the law"}),
    ("declared", {"spechead/a.py": "import torch.nn, os\nfrom . import b", "pyproject.toml": PROJECT}),
]


@pytest.mark.parametrize(("rule", "sources"), INNOCENT)
def test_what_is_allowed_passes(rule: str, sources: Sources) -> None:
    assert RULES[rule][0](sources) == []


def links(listing: str) -> list[str]:
    """Symbolic links of `git ls-files -s`: they lead out of a clone, or copy a file."""
    return [f"{line.split(maxsplit=3)[3]}: a link" for line in listing.splitlines() if line.startswith("120000 ")]


def test_no_link_is_kept() -> None:
    assert links("120000 9ab962b 0\tdata.jsonl\n100644 9ab962c 0\tREADME.md") == ["data.jsonl: a link"]
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert "README.md" in listed.stdout
    assert links(listed.stdout) == []
