"""The version of batchgen, and those of the packages that results may depend on. Imports none of them."""

from functools import cache

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Returns the versions of everything that a result may depend on."""
    import platform

    return {"python": platform.python_version(), "batchgen": __version__} | {
        name: version_of(name) for name in ("torch", "transformers", "tokenizers")
    }


@cache
def version_of(package: str) -> str:
    """Returns a package's version from its installed metadata, without importing it."""
    from importlib import metadata  # not with `import batchgen`, which imports this module

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
