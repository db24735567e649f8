"""Nothing on the way of a checkpoint into memory can execute what a file says, read from the source itself."""

from __future__ import annotations

import ast

import pytest
from test_layers import parsed
from test_style import CODE, ROOT, imported, names_of

# What runs code, imports by name, unpickles, or unpacks. A trailing dot stands for all that a module has.
FORBIDDEN = (
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "runpy.", "code.", "marshal."),
    *("importlib.import_module", "importlib.__import__", "importlib.util.spec_from_file_location", "pkgutil."),
    *("pickle.", "_pickle.", "cPickle.", "dill.", "cloudpickle.", "joblib.", "shelve.", "pickletools.", "copyreg."),
    *("torch.load", "torch.jit.load", "torch.package.", "torch.serialization.", "torch.export.load", "torch.hub."),
    *("torch.distributed.checkpoint.", "numpy.load", "pandas.read_pickle", "yaml.", "ruamel.", "xml.", "jsonpickle."),
    *("zipfile.", "tarfile.", "shutil.unpack_archive", "gzip.", "bz2.", "lzma.", "zlib.", "ctypes.CDLL"),
    *("subprocess.", "os.system", "os.popen", "os.execv", "os.posix_spawn"),
)
CONVERT = "framework/checkpoint/convert/"
# Foreign checkpoints that the user trusts are loaded in one place.
TRUSTING = f"{CONVERT}pickles.py"
# Modules that a checkpoint passes on its way, by the beginning of their names.
LOAD_PATH = (
    *("checkpoint.py", "framework/checkpoint/", "framework/resume/restore.py", "framework/state/module_loading.py"),
    *(
        "framework/resume/checkpoint_search.py",
        "framework/resume/resume_point.py",
        "framework/state/hyperparameters.py",
        "framework/state/module_state.py",
        "framework/state/optimizer_state.py",
        "framework/state/weight_averages.py",
    ),
    *(
        "framework/distributed/collective_errors.py",
        "framework/parallel/parameter_names.py",
        "framework/state/state_matching.py",
        "framework/resume/export.py",
    ),
    *(
        "framework/fabric/checkpoints.py",
        "framework/fabric/contents.py",
        "framework/fabric/loading.py",
        "framework/fabric/weight_files.py",
        "framework/distributed/seed.py",
        "framework/system/atomic_files.py",
    ),
    *("cli/main.py", "cli/checkpoint.py", "cli/terminal_text.py"),
)
# Why each exception is none: what it names does not come from a checkpoint.
EXCEPTIONS = {
    ("framework/system/atomic_files.py", "ctypes.CDLL"),  # the process's own C library, for one call that Python lacks
    # The user passes this file beside a checkpoint. The safe loader constructs plain values alone.
    *(("framework/state/hyperparameters.py", use) for use in ("yaml", "yaml.safe_load", "yaml.YAMLError")),
}


def dotted(source: str) -> list[tuple[int, str]]:
    """Return every dotted name that a source uses or imports, under the name of its origin, and the line."""
    tree = parsed(source)
    # A dotted name that was not imported is that of a variable, which may be called like a module.
    roots = {"builtins", *(origin.partition(".")[0] for _, origin in imported(tree))}
    found = [(line, name) for line, name in names_of(source) if name.partition(".")[0] in roots]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def dangers(source: str) -> list[str]:
    """Return where a source uses something that is forbidden."""
    found = []
    for line, name in dotted(source):
        for each in FORBIDDEN:
            if name == each.rstrip(".") or (each.endswith(".") and name.startswith(each)):
                found.append(f"{name} in line {line}")
    return found


def unsafe_loads(source: str) -> list[int]:
    """Return the lines that call ``torch.load`` without ``weights_only=True`` in so many words."""
    tree = parsed(source)
    aliases = dict(imported(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, _, rest = ast.unparse(node.func).partition(".")
            name = f"{aliases.get(head, head)}.{rest}" if rest else aliases.get(head, head)
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in ("torch.load", "torch.serialization.load") and said.get("weights_only") != "True":
                found.append(node.lineno)
    return found


def on_load_path() -> dict[str, str]:
    """Return the sources that a checkpoint passes; foreign formats are another matter."""
    names = {path.relative_to(ROOT).as_posix(): path for path in CODE}
    return {
        name: path.read_text()
        for name, path in names.items()
        if name.startswith(LOAD_PATH) and not name.startswith(CONVERT)
    }


def test_no_load_path_can_execute_anything() -> None:
    found = [f"{name}: {use}" for name, source in on_load_path().items() for use in dangers(source)]
    allowed = {f"{name}: {use}" for name, use in EXCEPTIONS}
    assert [use for use in found if use.partition(" in line")[0] not in allowed] == []


def test_every_load_path_exists() -> None:
    names = on_load_path()
    missing = [begin for begin in LOAD_PATH if not any(name.startswith(begin) for name in names)]
    assert missing == []
    assert len(names) > 25


def test_torch_loads_weights_alone_wherever_it_loads() -> None:
    found = {path.relative_to(ROOT).as_posix(): unsafe_loads(path.read_text()) for path in CODE}
    assert {name: len(lines) for name, lines in found.items() if lines} == {TRUSTING: 1}


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "import builtins\nbuiltins.exec(text)",
        "from importlib import import_module as find\nfind(document['class'])",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)",
        "from shutil import unpack_archive\nunpack_archive(path)",
        "import zipfile\nzipfile.ZipFile(path).extractall()",
        "import os\nos.system(document['command'])",
        "from torch.distributed.checkpoint import load",
        "import yaml",
    ],
)
def test_a_planted_danger_is_found(source: str) -> None:
    assert dangers(source)


def test_a_planted_unsafe_load_is_found() -> None:
    assert unsafe_loads("import torch\ntorch.load(path)") == [2]
    assert unsafe_loads("from torch import load as get\nget(path, weights_only=False)") == [2]
    assert unsafe_loads("import torch\ntorch.load(path, weights_only=safe)") == [2]
    assert not unsafe_loads("import torch\ntorch.load(path, weights_only=True)")


def test_harmless_neighbours_are_not_reported() -> None:
    source = "import re, torch, numpy, os\nre.compile('a')\ntorch.compile(f)\nself.load(1)\nnumpy.dtype('f4')"
    assert not dangers(f"{source}\nos.open('a')\ncode = 3\npickle = code")
