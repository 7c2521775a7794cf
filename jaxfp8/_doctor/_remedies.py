"""The commands to repair an installation."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import shlex
import shutil
import sys
import urllib.parse
import urllib.request
from typing import Any


def install_cublaslt() -> str:
    """Installs cuBLASLt."""
    return f'{_pip()} "jax[cuda13]"'


def update_jax() -> str:
    """Installs the newest JAX."""
    return f"{_pip()} --upgrade jax jaxlib"


def reinstall(platform: str) -> str:
    """The command to rebuild the library of a platform from its original source."""
    compiler = (
        "" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "apt-get install g++ && "
    )
    cuda = "JAXFP8_CUDA=1 " if platform == "cuda" else ""
    command = f"{compiler}{cuda}{_pip()} --force-reinstall --no-deps"
    origin, gone = _origin()
    if not gone:
        return f"{command} {origin}"
    return f"get the sources again, since {gone} is gone, and run in their folder: {command} ."


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install"


def _origin() -> tuple[str, str]:
    """The argument of pip to reinstall this package, and the deleted folder it needs or ""."""
    try:
        package = importlib.metadata.distribution("jaxfp8")
    except importlib.metadata.PackageNotFoundError:
        return shlex.quote(str(pathlib.Path(__file__).parents[2])), ""
    came_from = json.loads(package.read_text("direct_url.json") or "{}")
    if "url" not in came_from:
        return f"jaxfp8=={package.version}", ""
    return _of_url(came_from)


def _of_url(came_from: dict[str, Any]) -> tuple[str, str]:
    """The same from pip's record of an installation outside an index."""
    url = urllib.parse.urlsplit(came_from["url"])
    version_control = came_from.get("vcs_info")
    if version_control is not None:
        commit = version_control["commit_id"]
        return shlex.quote(f"{version_control['vcs']}+{came_from['url']}@{commit}"), ""
    if url.scheme != "file":
        return shlex.quote(came_from["url"]), ""
    place = urllib.request.url2pathname(url.path)
    editable = came_from.get("dir_info", {}).get("editable", False)
    gone = "" if pathlib.Path(place).exists() else place
    return ("--editable " if editable else "") + shlex.quote(place), gone
