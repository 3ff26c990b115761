"""Upload of exports to a Hugging Face Hub (`hf://ORG/NAME`) or an OCI registry
(`oci://HOST/NAME:TAG`).

The libraries find the credentials: HF_TOKEN (or `hf auth login`) with HF_ENDPOINT; for registries
those of `docker login`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from ft_service.errors import FtError, SpecError

_HUB = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)")
_REGISTRY = re.compile(
    r"oci://(?P<target>(?P<host>[\w.-]+(:\d+)?)/[a-z0-9][a-z0-9._/-]*(:[\w][\w.-]{0,127})?)"
)
ARTIFACT = "application/vnd.ft-service.model"
_INSTALL = "Install what pushing needs: pip install 'ft-service[push]'."


def check_address(address: str) -> None:
    """Raise SpecError for an address of neither kind."""
    if _HUB.fullmatch(address) is None and _REGISTRY.fullmatch(address) is None:
        raise SpecError(
            f"--push = {address!r}: give hf://ORG/NAME, or oci://HOST/NAME:TAG in small letters.",
            param="push",
        )


def push(folder: Path, address: str, title: str) -> str:
    """Upload the files of a folder. Returns their address. `title`: of the commit or annotation.

    A missing repository of a hub is created as private. Raises FtError with the server's message.
    """
    check_address(address)
    if match := _HUB.fullmatch(address):
        return _to_hub(folder, match["repository"], title)
    match = _REGISTRY.fullmatch(address)
    assert match is not None, "checked"
    return _to_registry(folder, match["target"], match["host"], title)


def _to_hub(folder: Path, repository: str, title: str) -> str:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise FtError(f"{error}. {_INSTALL}") from None
    api = HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=title)
    except Exception as error:  # several libraries raise errors of their own
        raise FtError(f"hf://{repository} was not pushed: {_words(error)}") from error
    return str(getattr(done, "commit_url", done))


def _to_registry(folder: Path, target: str, host: str, title: str) -> str:
    try:
        from oras.client import OrasClient
    except ImportError as error:
        raise FtError(f"{error}. {_INSTALL}") from None
    if ":" in str(folder):  # the library would read the rest as a media type
        raise SpecError(
            f"--out = {folder}: a folder without a colon in its path can be pushed to a registry.",
            param="out",
        )
    files = [
        f"{path.name}:{_media_type(path)}" for path in sorted(folder.iterdir()) if path.is_file()
    ]
    client = OrasClient(hostname=host, insecure=_is_loopback(host))
    try:
        answer = client.push(
            target=target,
            files=[f"{folder}/{file}" for file in files],
            disable_path_validation=True,
            manifest_annotations={"org.opencontainers.image.title": title},
            quiet=True,
        )
    except Exception as error:
        raise FtError(f"oci://{target} was not pushed: {_words(error)}") from error
    digest = answer.headers.get("Docker-Content-Digest", "")
    return f"{target}{f'@{digest}' if digest else ''}"


def _media_type(path: Path) -> str:
    return {".safetensors": f"{ARTIFACT}.safetensors", ".gguf": f"{ARTIFACT}.gguf"}.get(
        path.suffix, "application/octet-stream"
    )


def _is_loopback(host: str) -> bool:
    name = host.partition(":")[0]
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
