"""Bases from Hugging Face's hub, or from another with its API (HF_ENDPOINT): looked up, fetched,
and published as a whole.

    <model folder>/.pulls/<organisation>--<name>@<commit>/    being fetched, until all is verified
    <model folder>/<organisation>/<name>/                     the base, with origin.json

An interrupted pull keeps files and parts of files, and the next pull continues there.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ft_service.bases.base_files import DOCUMENT, limit_of, shown
from ft_service.bases.origin import Origin, is_published, read_origin, write_origin
from ft_service.errors import FtError, SpecError, UnavailableError, is_lost

STAGED = ".pulls"
ENDPOINT = "https://huggingface.co"
_WEIGHTS = "*.safetensors"
_TWICE = ("consolidated*", "adapter_model*")
"""Weights in another layout, which a base holds twice, and weights of adapters."""
_SMALL = (
    *(
        "config.json",
        "generation_config.json",
        "*.safetensors.index.json",
        "tokenizer*",
        "chat_template*",
        "*.jinja",
    ),
    *(
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab*",
        "merges.txt",
        "*.model",
        "preprocessor_config.json",
    ),
    *("processor_config.json", "LICENSE*", "LICENCE*", "additional_chat_templates/*.jinja"),
)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")
"""Names of files that may be fetched."""
_COMMIT = re.compile(r"[0-9A-Za-z]{7,64}")
_LONGEST_NAME = 255
_SHOWN = 80
_SPARE_BYTES = 2**30
_PART = ".part"
_AT_ONCE = 4
"""Files that are fetched at the same time."""
_TIMEOUT_SECONDS = 20.0


Kind = Literal["model", "dataset"]
"""Kind of a repository."""


@dataclass(frozen=True)
class HubFile:
    bytes: int
    sha256: str | None
    """None: the hub has none, as for small files."""


@dataclass(frozen=True)
class HubRepository:
    """A model or a data set at a commit."""

    repository: str
    revision: str
    """The revision that the user named."""
    commit: str
    licence: str | None
    files: Mapping[str, HubFile]
    kind: Kind = "model"

    def small_files(self) -> list[str]:
        """Names of the files of configuration and tokenizer."""
        return sorted(
            name for name in self.files if any(_matches(name, pattern) for pattern in _SMALL)
        )

    def weights(self) -> list[str]:
        """Names of the files of weights. Raises SpecError if there are none in safetensors."""
        at_root = [name for name in self.files if "/" not in name]
        found = sorted(
            name
            for name in at_root
            if fnmatchcase(name, _WEIGHTS)
            and not name.startswith(".")
            and not any(fnmatchcase(name, other) for other in _TWICE)
        )
        if found and "config.json" in self.files:
            return found
        other = sorted(
            name for name in at_root if any(fnmatchcase(name, pattern) for pattern in _PICKLED)
        )
        what = (
            "no config.json"
            if found
            else "no weights in safetensors" + (f", only {other[0]}" if other else "")
        )
        hint = "; an adapter is named by its base" if "adapter_config.json" in self.files else ""
        raise SpecError(
            f"{self.repository} holds {what}: no base that can be tuned here{hint}.", param="model"
        )

    def refuse_odd_files(self) -> None:
        """Raise SpecError for a repository with a path that leads out of its folder, or with a file
        to be fetched that has an unusual name or is larger than its limit.
        """
        for name in self.files:
            if not _stays_inside(name):
                raise self._refusal(
                    f"a file {shown(name)}, which leads out of its folder or cannot be the name "
                    "of one"
                )
        for name in [*self.small_files(), *self.weights()] if self.kind == "model" else []:
            if not is_plain_name(name):
                why = (
                    "and a base's files have names of letters, digits and `_.+-` that do not "
                    "begin with a dot"
                )
                raise self._refusal(f"a file {shown(name)}, {why}")
            limit = (
                None if _matches(name, _WEIGHTS) else limit_of(name.rpartition("/")[2]) or DOCUMENT
            )
            if limit is not None and self.files[name].bytes > limit.bytes:
                size = f"{name} with {_gb(self.files[name].bytes)}"
                raise self._refusal(
                    f"{size}, which is more than such a file of a base may have "
                    f"({_gb(limit.bytes)})"
                )

    def _refusal(self, listed: str) -> SpecError:
        return SpecError(
            f"{self.repository} lists {listed}: nothing of it is fetched.", param="model"
        )

    def bytes(self, names: Sequence[str]) -> int:
        return sum(self.files[name].bytes for name in names)


def _matches(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern folder by folder: `*` does not match `/`."""
    parts = name.split("/")
    patterns = pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def is_plain_name(name: str) -> bool:
    """Whether a path is that of a file that may be fetched: letters, digits and `_.+-`, without
    hidden folders.
    """
    return _NAME.fullmatch(name) is not None and _stays_inside(name)


def _stays_inside(name: str) -> bool:
    """Whether it is a relative path that is valid on any machine and stays in its folder."""
    parts = name.split("/")
    fits = all(
        part not in ("", ".", "..") and len(part.encode(errors="replace")) <= _LONGEST_NAME
        for part in parts
    )
    return fits and name.isprintable() and "\\" not in name


def parse_name(given: str) -> tuple[str, str]:
    """(repository, revision) of `ORG/NAME[@revision]`. Raises SpecError."""
    bare = re.sub(r"^(https?://[^/]+/(datasets/)?|hf://)", "", given).rstrip("/")
    repository, _, revision = bare.partition("@")
    if not is_published(repository) or (given.endswith("@")):
        raise SpecError(
            f"{given!r} names no model: write ORG/NAME, or ORG/NAME@REVISION, as its page does.",
            param="model",
        )
    return repository, revision or "main"


def look_up(repository: str, revision: str, kind: Kind = "model") -> HubRepository:
    """Look up a model or a data set.

    Raises SpecError if it does not exist or may not be read, UnavailableError.
    """
    hub = _library()
    with _hub_errors(repository, revision):
        api = hub.HfApi(endpoint=endpoint(), library_name="ft-service")
        ask = api.model_info if kind == "model" else api.dataset_info
        info = ask(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    card = info.card_data.to_dict() if info.card_data else {}
    licence = card.get("license_name") if card.get("license") == "other" else card.get("license")
    files = {
        file.rfilename: HubFile(file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
        if file.rfilename
    }
    if _COMMIT.fullmatch(str(info.sha)) is None:
        raise UnavailableError(
            f"{endpoint()} names no commit of {repository}, but {str(info.sha)[:_SHOWN]!r}."
        )
    usable = isinstance(licence, str) and licence.isprintable() and len(licence) <= _SHOWN
    model = HubRepository(
        repository, revision, str(info.sha), licence if usable else None, files, kind
    )
    model.refuse_odd_files()
    return model


def pull(
    model: HubRepository,
    folder: Path,
    name: str,
    judge: Callable[[Path], object],
    tell: Callable[[str], object],
    *,
    shows_bars: bool,
) -> Path:
    """Fetch a base into `folder` under `name`. Returns its folder.

    `judge`: called with a folder that has all files except the weights before these are fetched;
    raises FtError for a base that cannot be trained. Raises SpecError for a model without a base's
    files, FtError for a full disk, a damaged file and a folder that exists already;
    UnavailableError.
    """
    weights = model.weights()
    refuse_taken(folder / name)
    with _alone(model, _staged_of(model, folder)) as staged:
        _fetch_files(model, staged, model.small_files(), shows_bars=False)
        try:
            judge(staged)
        except FtError as error:
            if not is_lost(error):  # else the next pull goes on with what has arrived before
                shutil.rmtree(staged, ignore_errors=True)
            raise
        files = "file" if len(weights) == 1 else "files"
        tell(
            f"{model.repository} at {model.commit[:12]}: {len(weights)} {files} of weights, "
            f"{_gb(model.bytes(weights))}."
        )
        _require_room(folder, staged, model.bytes([*weights, *model.small_files()]))
        _fetch_files(model, staged, weights, shows_bars=shows_bars)
        tell("Reading it once more, to compare it with the hub's digests.")
        return _publish(model, staged, folder / name)


def fetch_small_files(model: HubRepository, folder: Path) -> Path:
    """Fetch what a base's description and plan need, all but its weights, into the folder where
    `pull` goes on. Returns that folder. Raises as `pull`.
    """
    model.weights()  # refused before anything is written
    with _alone(model, _staged_of(model, folder)) as staged:
        _fetch_files(model, staged, model.small_files(), shows_bars=False)
        return staged


def refuse_taken(target: Path) -> None:
    """Raise FtError if there is something in the place of a base."""
    if target.exists():
        raise FtError(
            f"{target} exists{_whose(target)}. Remove it, or give this one another name with --as.",
            param="model",
        )


def is_there(target: Path, repository: str, commit: str) -> bool:
    """Whether a folder holds a repository at a commit, as it was pulled."""
    origin = read_origin(target)
    return origin is not None and (origin.repository, origin.commit) == (repository, commit)


def _staged_of(model: HubRepository, folder: Path) -> Path:
    return folder / STAGED / f"{model.repository.replace('/', '--')}@{model.commit[:12]}"


def _publish(model: HubRepository, staged: Path, target: Path) -> Path:
    """Compare all files with the hub's digests, and move them to their place."""
    downloaded = digests(model, staged, [*model.small_files(), *model.weights()])
    write_origin(
        staged, Origin(model.repository, model.revision, model.commit, model.licence, downloaded)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    return target


@contextmanager
def _alone(model: HubRepository, staged: Path) -> Iterator[Path]:
    """Keep other processes from fetching into a folder, since two would write the same parts.

    Raises FtError if one does already.
    """
    _make(staged)
    held = os.open(staged, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise FtError(
            f"{model.repository} is being fetched already, by another process.", param="model"
        ) from None
    try:
        yield staged
    finally:
        os.close(held)


def fetch(found: HubRepository, staged: Path, names: Sequence[str], *, shows_bars: bool) -> None:
    """Fetch files of a repository into a folder, and continue an interrupted try.

    Raises FtError for a full disk, SpecError and UnavailableError as `look_up`.
    """
    _make(staged)
    _require_room(staged.parent, staged, found.bytes(names))
    _fetch_files(found, staged, names, shows_bars=shows_bars)


def _require_room(folder: Path, staged: Path, whole: int) -> None:
    left = whole - held(staged)
    free = shutil.disk_usage(staged).free
    if left + _SPARE_BYTES > free:
        raise FtError(
            f"{folder} has {_gb(free)} free, and {_gb(left)} are still to come: make room.",
            param="model",
        )


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _whose(target: Path) -> str:
    origin = read_origin(target)
    return f", with {origin.repository} at {origin.commit[:12]}" if origin else ""


def _make(staged: Path) -> None:
    try:
        staged.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FtError(
            f"{staged.parents[1]} cannot be written: {error.strerror}.", param="FT_MODELS"
        ) from None


def _fetch_files(
    model: HubRepository, staged: Path, names: Sequence[str], *, shows_bars: bool
) -> None:
    """Fetch a few files at a time.

    The library's own download of a repository cannot continue an interrupted file.
    """
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if shows_bars:
        enable_progress_bars()
    else:
        disable_progress_bars()
    left = [name for name in names if not (staged / name).is_file()]
    stop = threading.Event()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        coming = [threads.submit(_fetch_file, model, staged, name, stop) for name in left]
        try:
            for each in coming:
                each.result()
        except BaseException:
            stop.set()
            threads.shutdown(cancel_futures=True)
            raise


class _Part(io.BufferedWriter):
    """A file that is written at its end until `stop` is set."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "a"))
        self._stop = stop

    def write(self, chunk: Any, /) -> int:
        if self._stop.is_set():
            raise InterruptedError("another file could not be fetched")
        return super().write(chunk)


def _fetch_file(model: HubRepository, staged: Path, name: str, stop: threading.Event) -> None:
    """Fetch a file, and continue an interrupted try."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = staged / f"{name}{_PART}"
    size = model.files[name].bytes
    part.parent.mkdir(parents=True, exist_ok=True)
    url = _library().hf_hub_url(
        model.repository, name, repo_type=model.kind, revision=model.commit, endpoint=endpoint()
    )
    with _hub_errors(model.repository, model.revision), _Part(part, stop) as file:
        if file.tell() < size:
            headers = build_hf_headers(library_name="ft-service")
            http_get(
                url,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=size,
                displayed_filename=name,
            )
    part.rename(staged / name)


def held(staged: Path) -> int:
    """Bytes of the files in a folder, also while others are written and renamed there."""
    total = 0
    for folder, _, names in os.walk(staged):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total


def digests(model: HubRepository, staged: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of every file.

    Raises FtError for a file that differs from the hub's, and removes it.
    """
    sha256_by_name = {name: _sha256(staged / name) for name in names}
    for name, digest in sha256_by_name.items():
        expected = model.files[name].sha256
        if expected is not None and expected != digest:
            (staged / name).unlink()
            raise FtError(
                f"{name} of {model.repository} arrived damaged and was removed: pull it again.",
                param="model",
            )
    return sha256_by_name


def _transport_errors() -> tuple[type[Exception], ...]:
    """Errors of the HTTP library that huggingface_hub has loaded: httpx2, or httpx before its
    version 2.
    """
    return tuple(sys.modules[name].HTTPError for name in ("httpx2", "httpx") if name in sys.modules)


@contextmanager
def _hub_errors(repository: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub, the network and the disk into SpecError, UnavailableError and
    FtError.
    """
    from huggingface_hub import errors

    where = endpoint()
    token = _library().get_token()
    if token and not token.isascii():
        text = (
            "HF_TOKEN, or the token of `hf auth login`, has characters that no token has. Copy "
            "it again from the hub's page."
        )
        raise SpecError(text, param="HF_TOKEN")
    try:
        yield
    except errors.GatedRepoError:
        way = (
            "the token in use has no access to it yet"
            if token
            else "then set HF_TOKEN to a token of that account"
        )
        message = f"{repository} is gated: accept its terms at {where}/{repository}; {way}."
        raise SpecError(message, param="model", code="gated") from None
    except errors.RevisionNotFoundError:
        message = (
            f"{repository} has no revision {revision!r}. Leave it out for the newest, or "
            "name a branch, a tag or a commit."
        )
        raise SpecError(message, param="model", code="model_not_found") from None
    except errors.RepositoryNotFoundError:
        private = "your token may not see it" if token else "a private one needs HF_TOKEN"
        message = f"There is no model {repository} at {where}, or it is private ({private})."
        raise SpecError(message, param="model", code="model_not_found") from None
    except errors.OfflineModeIsEnabled:
        raise UnavailableError(
            "HF_HUB_OFFLINE is set, so nothing is fetched. Unset it, or copy the model's folder "
            "below one that FT_MODELS names."
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "nothing"
        raise UnavailableError(
            f"{where} answered {status} for {repository}. Pull it again: it goes on with what has "
            "arrived."
        ) from None
    except (*_transport_errors(), errors.LocalEntryNotFoundError, ConnectionError) as error:
        why = type(error.__cause__ or error).__name__
        raise UnavailableError(
            f"{where} cannot be reached ({why}). Pull it again: it goes on with what has arrived. "
            "Without a network copy the model's folder below one that FT_MODELS names."
        ) from None
    except ValueError as error:  # the library refuses a name or an answer
        said = " ".join(str(error).split())[:300]
        raise UnavailableError(
            f"What {where} says of {repository} cannot be used: {said}"
        ) from None
    except OSError as error:
        raise FtError(
            f"{repository} cannot be written here: {error.strerror or error}. What has arrived is "
            "kept."
        ) from None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        message = (
            "ft pull needs the package huggingface_hub, which is missing: pip install "
            "huggingface_hub."
        )
        raise FtError(message, code="missing_package") from None
    return huggingface_hub


def without_token(text: str) -> str:
    """A text for others than the hub's user: without the token, which libraries may quote."""
    token = _library().get_token()
    return text.replace(token, "[HF_TOKEN]") if token else text


def _gb(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
