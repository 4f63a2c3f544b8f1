"""What the results of a run depend on besides its settings: the Python files that it imports, and its data.

Each file or folder has a fingerprint, so that results are not used again after one of them has changed.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from laconic.tools.compare.settings import Run, Script

Fingerprints: TypeAlias = dict[str, str]
"""A fingerprint by path."""


def given_files(run: Run) -> Fingerprints:
    """The script and every file or folder that is named in its arguments, or the data of the lab."""
    if not isinstance(run, Script):
        return fingerprints([] if run.data is None else [run.data])
    words = [word.partition("=")[2] if word.startswith("-") and "=" in word else word for word in run.arguments]
    return fingerprints([run.script, *(Path(word) for word in words if word and os.path.exists(word))])


def imported_files() -> Fingerprints:
    """The files of all modules that this process has imported, without those of Python and of installed packages."""
    found = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    return fingerprints(path for path in {Path(name) for name in found if name} if not _is_installed(path.absolute()))


def _is_installed(path: Path) -> bool:
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(path.is_relative_to(x) for x in library)


def fingerprints(paths: Iterable[Path]) -> Fingerprints:
    """The fingerprint of each path, by its absolute path."""
    return {str(path.absolute()): fingerprint(path) for path in paths}


def fingerprint(path: Path) -> str:
    """A digest of a Python file's content; of any other file's size and time of change, and of all in a folder."""
    try:
        if path.suffix == ".py" and path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        inside = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        stats = {str(file): file.stat() for file in sorted(inside if path.is_dir() else [path])}
    except OSError:
        return "unreadable"
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def changed(files: Mapping[str, str]) -> str | None:
    """The first path whose fingerprint is not this one any more; None if there is none."""
    return next((path for path, before in files.items() if fingerprint(Path(path)) != before), None)
