"""The distribution: its name on the package index, and the other project that has the name `laconic` there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "laconic-train"
"""What pip installs. It installs `import laconic` and the command `laconic`."""


def pip_install(extra: str) -> str:
    """Return the command that installs what an extra needs.

    >>> pip_install("report")
    'pip install "laconic-train[report]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def other_project() -> tuple[str, str, str] | None:
    """Return what is wrong if the other project is installed in this environment, too: found, why, way out."""
    try:
        found = version("laconic")
    except PackageNotFoundError:
        return None
    return (
        f'the distribution "laconic" {found} is installed beside {DISTRIBUTION}',
        "It is another project with the same import name and command: one overwrites files of the other.",
        f"pip uninstall laconic, then install {DISTRIBUTION} again, with --force-reinstall --no-deps.",
    )
