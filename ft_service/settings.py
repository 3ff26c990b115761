"""Settings of the service: environment variables with the prefix FT_, read once, in `main`, and
passed down.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ft_service.errors import SpecError

ENGINE_JOBS = 8
"""Most jobs of an engine on a host whose operator does not say."""
NO_HEADER_TEXT = (
    "holds a line break, or another character that no HTTP header can carry: give the key alone"
)
OTHER_VARIABLES = (
    "FT_CACHE",
    "FT_CACHE_BYTES",
    "FT_TOKENS",
    "FT_CHECKPOINT_ADAPTERS",
    "FT_PASS_ENVIRONMENT",
)
"""Variables of the service's processes that are no fields of `Settings`."""
_OF_OTHERS = ("FT_BASE_URL", "FT_API_KEY", "FT_TEST_RUN")
"""Variables of clients and tests."""
_MISSPELT = 0.85
"""Likeness (difflib) from which on a name is taken to be a misspelt one."""
_KEYS = ("inference_api_key", "teacher_api_key", "wandb_api_key", "mlflow_token", "trackio_token")
"""Settings that are sent in headers."""


def _separated(urls: str) -> list[str]:
    return [url.strip().rstrip("/") for url in urls.split(",") if url.strip()]


def _address(name: str, url: str) -> SplitResult:
    """Return the parts of a URL.

    `name`: its setting. Raises ValueError for what no request can be sent to.
    """
    try:
        parts = urlsplit(url)
        parts.port  # of "http://host:port" none can be read  # noqa: B018
    except ValueError as error:
        raise ValueError(f"{name}: {url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name}: {url!r} must begin with http:// or https:// and a host")
    return parts


def is_header_text(key: str) -> bool:
    """Return whether an HTTP header can carry a key.

    The error of a client that cannot send it would show it.
    """
    return key.isascii() and key.isprintable()


class Settings(BaseSettings):
    """Settings, each of which is an environment variable: `home` is FT_HOME.

    Not here are FT_CACHE, FT_CACHE_BYTES (ft_service/bases/cache_folder.py), FT_TOKENS
    (ft_service/data/token_folder.py) and FT_CHECKPOINT_ADAPTERS
    (workers/output/checkpoint_saver.py): they are settings of the workers, and supervisors pass
    them on. ft_service/host/environment.py decides which other variables child processes get,
    FT_PASS_ENVIRONMENT among them.
    """

    model_config = SettingsConfigDict(
        env_prefix="FT_",
        # else an empty FT_BIND is every address, and an empty FT_HOME the current folder
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )

    home: Path = Path("~/.ft")
    """State: database, uploaded files, run directories, credentials."""
    database_url: str = ""
    """SQLAlchemy URL; empty: SQLite in FT_HOME.

    PostgreSQL: postgresql+psycopg://user:password@host/name.
    """
    database_url_file: Path | None = None
    """File that contains the URL, for a password outside the environment."""
    database_connections: int = Field(default=24, ge=4, le=1000)
    """Most connections of each process to the database; whoever finds none free waits for one, 10
    seconds at most.
    """
    database_statement_seconds: float = Field(default=30.0, ge=1, le=3600, allow_inf_nan=False)
    """Seconds after which PostgreSQL ends a statement, or a transaction whose process does nothing;
    without an answer 5 seconds later, the service gives the connection up and makes another.
    """
    models: Annotated[list[Path], NoDecode] = []
    """Folders of base models in Hugging Face layout, separated as in PATH; empty:
    FT_HOME/models.
    """
    model_aliases: Path | None = None
    """YAML file: name that clients send → name of a base."""
    storage: str = Field(default="", pattern=r"^((s3|gs)://.+)?$")
    """Object storage for run directories and files: s3://bucket/prefix or gs://bucket/prefix, with
    the credentials that s3fs or gcsfs find. Empty: FT_HOME, which pods must share. With FT_LAUNCHER
    = kubernetes only.
    """
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port at which `ft reconcile` serves its Prometheus metrics, without a key; None: none.

    `ft serve` has /metrics.
    """
    launcher: Literal["local", "kubernetes", "slurm"] = "local"
    """Place where jobs run: processes of this host, pods of a Kubernetes cluster, or batch jobs of
    a Slurm cluster.
    """
    pod_profile: Path | None = None
    """YAML file with the settings of worker pods, for FT_LAUNCHER = kubernetes."""
    slurm_profile: Path | None = None
    """YAML file with the settings of batch jobs, for FT_LAUNCHER = slurm."""
    prices: Path | None = None
    """YAML file with the price of a slot-hour in each place where jobs run, its currency, and grams
    of CO2 of a kWh (docs/costs.md), read when the service starts. None: costs are not counted.
    """
    bootstrap_key_file: Path | None = None
    """File whose content becomes the first admin key, instead of a random one."""
    organization: str = Field(default="local", pattern=r"^[a-z0-9-]{1,40}$")
    """Name of the organisation in the names of tuned models.

    Another one is given to all its projects when the server starts; names of models stay.
    """
    bind: str = Field(default="127.0.0.1", min_length=1)
    """Address the server listens on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free port; the chosen one is printed and written to FT_HOME/server.json."""
    public_url: str = Field(default="", pattern=r"^(https?://[^?#\s]+[^?#\s/])?$")
    """Address of this server, without /v1, as agents of reinforcement learning reach it from where
    they run. Empty: the address that it listens on.
    """
    max_streams: int = Field(default=100, ge=1)
    """Streams of events or logs that a key may follow at once on each server."""
    max_connections: int = Field(default=1000, ge=16)
    """Open connections of the server at once; fewer if the process may open fewer files (ulimit
    -n).
    """
    page: Literal["on", "off"] = "on"
    """Page for browsers below `/`, with their sessions; off: only the REST API."""
    slots: int | None = Field(default=None, ge=1, le=1024)
    """Ranks that this host runs at once; None: its number of GPUs, or without a GPU of processors
    (at least 2).
    """
    preempt_after_minutes: float | None = Field(default=None, ge=0)
    """Minutes for which a job holds its slots before one of higher priority may take them.

    The job then stops at a checkpoint and is queued again, so this is also the shortest time
    between two preemptions. None: jobs are never preempted.
    """
    engine_jobs: int | None = Field(default=None, ge=0, le=64)
    """Most jobs that an engine trains at once: jobs of one project on the same base share its
    weights and ranks. 0: every job has ranks of its own. None: ENGINE_JOBS on this host, 0 in a
    cluster.
    """
    max_file_bytes: int = Field(default=512 * 1024**2, ge=1)
    """Largest file uploaded in one request."""
    max_upload_bytes: int = Field(default=8 * 1024**3, ge=1)
    """Largest file uploaded in parts."""
    result_files_plain: bool = False
    """Serve metrics files as plain CSV instead of base64, which existing OpenAI scripts decode."""
    webhook_allow_private: bool = False
    """Deliver webhooks to private addresses, and over plain HTTP; fetch images from there too.

    Users can then make the server send requests to the internal network.
    """
    image_bytes: int = Field(default=10 * 1024**2, ge=1024, le=64 * 1024**2)
    """Largest image of a data file or a chat, encoded. Workers that tokenise data themselves, as on
    other hosts without the kept tokens, need the same value.
    """
    line_images: int = Field(default=10, ge=1, le=64)
    """Most images of a line of a data file, of a chat, and of a Tinker client's sequence."""
    inference_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Base URL (with /v1) of an OpenAI-compatible server that serves the tuned models by their
    names: chat completions are forwarded to it. Several replicas are separated by commas. Empty:
    this service answers them (preview), or refuses them.
    """
    adapters: Path | None = None
    """Folder that the inference server sees under the same path.

    The adapter of every job that succeeds is copied there under the tuned model's name, loaded by
    every replica of inference_url, and verified; so are weights that Tinker's clients sample from,
    while they do. None: the operator does that.
    """
    preview: Literal["auto", "on", "off"] = "auto"
    """Answer chat completions for bases and tuned models in a process of this host if inference_url
    is empty: a preview to try models, not a serving engine. auto: if jobs run as processes of this
    host too, and the server moves them.
    """
    preview_idle_seconds: float = Field(default=600.0, gt=0)
    """Seconds without a request after which the preview's process ends."""
    tinker: Literal["on", "off"] = "on"
    """Tinker's wire below `/api/v1`, by which clients run the training loop themselves."""
    mcp: Literal["on", "off"] = "off"
    """Tools for coding agents at `/mcp` (Model Context Protocol, streamable HTTP), with the rights
    of the caller's key. Needs the package `ft-service[mcp]`.
    """
    tinker_options: Path | None = None
    """YAML file with options of jobs (precision, lora, training, distributed, checkpoint) for all
    models that Tinker's clients create. None: the defaults.
    """
    tinker_idle_seconds: float = Field(default=300.0, gt=0)
    """Seconds after which a model whose client sends nothing is paused, so that others get its
    slots. Its next command resumes it.
    """
    unattended_seconds: float = Field(default=900.0, ge=1, allow_inf_nan=False)
    """Seconds without a sign of this service after which ranks that only wait for it write a
    checkpoint and leave: those of Tinker's models and of reinforcement learning. The job continues
    when the service is back. What trains by itself goes on.
    """
    inference_api_key: SecretStr | None = None
    """API key of that server; None: it needs none."""
    teacher_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Base URL (with /v1) of a vLLM server that serves bases which teach, by their names in
    FT_MODELS: jobs with method.distillation.teacher_at: server ask it about their students' answers
    (prompt_logprobs). Several replicas are separated by commas. Empty: such jobs are refused.
    """
    teacher_api_key: SecretStr | None = None
    """API key of that server; None: it needs none."""
    grader_models: Path | None = None
    """YAML file: name of a model that graders of type score_model and label_model may ask →
    base_url (with /v1) of an OpenAI-compatible server, key_file with its API key, model (its name
    there). None: such graders are refused.
    """
    wandb_api_key: SecretStr | None = None
    """Key for Weights & Biases, to which metrics of jobs with `integrations` are sent; None: such
    jobs are refused. Needs the extra `wandb`.
    """
    wandb_base_url: str = Field(default="https://api.wandb.ai", pattern=r"^https?://.+$")
    """URL of Weights & Biases, or of your own W&B server."""
    mlflow_tracking_uri: str | None = None
    """URL of MLflow (https://…, or file:///… of this host), to which metrics are sent of jobs that
    ask for it; None: such jobs are refused. Needs the extra `mlflow`.
    """
    mlflow_token: SecretStr | None = None
    """Bearer token of that server; None: it needs none."""
    trackio_url: str | None = Field(default=None, pattern=r"^(https?://.+|file:///.+)$")
    """URL of trackio (https://… of a server, or file:///… of this host), to which metrics are sent
    of jobs that ask for it; None: such jobs are refused. Needs the extra `trackio`.
    """
    trackio_token: SecretStr | None = None
    """Write token of that server; None: it needs none, as a folder does."""
    oidc_issuer: str = Field(default="", pattern=r"^(https?://[^?#\s]+)?$")
    """Issuer of an OpenID Connect provider, exactly as its discovery document names it: people sign
    in on the page through it. Empty: only keys and links sign in. Plain http only for this host.
    Needs the extra `oidc`.
    """
    oidc_client_id: str = ""
    """This service's client at the provider, with the redirect URI <address of the
    page>/sign-in/oidc/callback and the post-logout redirect URI <address of the page>/sign-in.
    """
    oidc_client_secret: SecretStr | None = None
    """The client's secret; None: a public client, which PKCE alone protects."""
    oidc_client_secret_file: Path | None = None
    """File that contains the secret."""
    oidc_scopes: str = "openid profile email"
    """Scopes to ask the provider for; some need another one, such as groups, to tell a person's
    groups.
    """
    oidc_groups_claim: str = Field(default="groups", min_length=1)
    """Claim of the ID token, or else of the user info, with a person's groups; within objects:
    realm_access.roles.
    """
    oidc_groups: Path | None = None
    """YAML file: group → project → scope (admin, submit or read); the group "*" is everyone who can
    sign in. None: the claim itself names what it opens, as PROJECT:SCOPE.
    """
    oidc_session_minutes: float = Field(default=480.0, ge=1, le=1440)
    """Minutes after which the provider is asked again, without a question to a person who is still
    signed in there: a group that was taken away holds for so long at most.
    """
    oidc_key_days: float = Field(default=30.0, gt=0, le=366)
    """Days after a person's last sign-in for which API keys that the person has made work; the next
    sign-in lets them work again, unless it finds the groups gone.
    """
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged. debug includes health checks, scrapes of /metrics, and the
    polling of clients that watch a job.
    """
    log_format: Literal["auto", "json", "text"] = "auto"
    """Format of the log on stderr. json: one object per line; text: for people; auto: text on a
    terminal, else json.
    """
    metrics_open: bool = False
    """Serve /metrics without a key. It contains numbers of all projects, and no names."""
    keep_runs_days: float | None = Field(default=None, ge=0)
    """Days after a job's end for which its run directory is kept; then logs, checkpoints and
    adapter are removed, and the tuned model is deleted. None: until `ft prune`.
    """
    keep_checkpoints_days: float | None = Field(default=None, ge=0)
    """Days after a job's end for which its checkpoints are kept."""
    keep_files_days: float | None = Field(default=None, ge=0)
    """Days after their creation for which uploaded files and result files are kept, unless an
    unfinished job needs them.
    """
    keep_cache_days: float | None = Field(default=None, ge=0)
    """Days since their last use for which quantised bases and descriptions in FT_CACHE, and tokens
    of data files in FT_TOKENS, are kept.
    """
    keep_jobs_days: float | None = Field(default=None, ge=0)
    """Days after a job's end for which the job is kept; then the server deletes it as `ft rm --job`
    does: its record with its events, its run directory, its tuned models and its file of metrics.
    Jobs that continue from it keep what they need. None: until it is deleted.
    """
    keep_events_days: float | None = Field(default=None, ge=0)
    """Days after a job's end for which its events are kept, and the curves that are drawn from
    them; its file of metrics stays. None: as long as the job.
    """
    keep_audit_days: float | None = Field(default=None, ge=0)
    """Days for which entries of the audit log are kept, which the server then removes.

    None: for ever.
    """
    audit_log: str = ""
    """Where each entry of the audit log is also written, as a line of JSON, once its change is
    stored: a file, to which lines are appended, or `stdout` for what reads a container's output.
    Each process writes its own: the server, the reconciler and, to a file only, commands that
    change this machine's database. Empty: nowhere.
    """
    max_key_days: float | None = Field(default=None, gt=0, le=3650)
    """Longest life of an API key in days. A key that is made without an end ends then, and one that
    is to live longer is refused. Keys that are older than that, counted from when they were made,
    end when the server starts; raising the number later does not bring them back. Keys of scope
    `metrics` may live longer. Keys are renewed by `ft keys rotate`. None: no limit.
    """
    trusted_proxies: str = ""
    """Addresses or networks of the proxies in front of the server, separated by commas, whose
    X-Forwarded-For and X-Forwarded-Proto are believed: the audit log then names the client's
    address, not the proxy's. `*`: whoever connects. Empty: none.
    """
    stored_chats_days: float | None = Field(default=None, gt=0, le=3650)
    """Days for which chat completions and responses with `store: true` are kept, for their project
    alone, so that data can be made of chats and conversations go on. None: none is kept, and such
    requests are refused.
    """
    stored_chats_bytes: int = Field(default=256 * 1024**2, ge=1024**2)
    """Bytes of the chats and responses that are kept for a project; beyond that, its oldest ones
    go.
    """
    stop_grace_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for which an attempt may write a checkpoint and exit before it is killed."""

    @field_validator(*_KEYS, "oidc_client_secret", mode="before")
    @classmethod
    def _whole_key(cls, value: object) -> object:
        """The key without the line break with which its file has ended; None without a key."""
        return (value.strip() or None) if isinstance(value, str) else value

    @field_validator("models", mode="before")
    @classmethod
    def _split_path(cls, value: object) -> object:
        return (
            [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value
        )

    @field_validator("home", "models", mode="after")
    @classmethod
    def _absolute(cls, value: Path | list[Path]) -> Path | list[Path]:
        if isinstance(value, list):
            return [path.expanduser().absolute() for path in value]
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _keys_of_headers(self) -> Settings:
        for name in _KEYS:  # not in a validator of the field, whose error would show the key
            key: SecretStr | None = getattr(self, name)
            if key is not None and not is_header_text(key.get_secret_value()):
                raise ValueError(f"FT_{name.upper()} {NO_HEADER_TEXT}")
        return self

    @model_validator(mode="after")
    def _one_database_url(self) -> Settings:
        if self.database_url and self.database_url_file:
            raise ValueError("FT_DATABASE_URL and FT_DATABASE_URL_FILE are both set: unset one")
        return self

    @model_validator(mode="after")
    def _whole_client(self) -> Settings:
        if not self.oidc_issuer:
            return self
        url = _address("FT_OIDC_ISSUER", self.oidc_issuer)
        if url.scheme == "http" and url.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError(
                f"FT_OIDC_ISSUER = {self.oidc_issuer}: use https, since whoever answers there "
                "decides who signs in"
            )
        if not self.oidc_client_id:
            raise ValueError(
                "FT_OIDC_ISSUER needs FT_OIDC_CLIENT_ID, this service's client at the provider"
            )
        if self.oidc_client_secret and self.oidc_client_secret_file:
            raise ValueError(
                "FT_OIDC_CLIENT_SECRET and FT_OIDC_CLIENT_SECRET_FILE are both set: unset one"
            )
        if "openid" not in self.oidc_scopes.split():
            raise ValueError(
                f"FT_OIDC_SCOPES = {self.oidc_scopes!r}: openid is missing, without which there "
                "is no sign-in"
            )
        if self.page == "off":
            raise ValueError(
                "FT_OIDC_ISSUER and FT_PAGE = off: there is no page to sign in on. Unset one"
            )
        return self

    @model_validator(mode="after")
    def _one_host_to_preview(self) -> Settings:
        if self.preview == "on" and self.launcher != "local":
            raise ValueError(
                "FT_PREVIEW = on needs FT_LAUNCHER = local: with a cluster the service has no "
                "host to run the preview on"
            )
        if self.preview == "on" and self.inference_url:
            raise ValueError(
                "FT_PREVIEW = on and FT_INFERENCE_URL are both set: only one can answer. Unset one"
            )
        return self

    @model_validator(mode="after")
    def _addresses_of_replicas(self) -> Settings:
        for url in self.inference_urls:
            _address("FT_INFERENCE_URL", url)
        for url in self.teacher_urls:
            _address("FT_TEACHER_URL", url)
        return self

    @model_validator(mode="after")
    def _engines_that_share(self) -> Settings:
        if self.engine_jobs == 1:
            raise ValueError(
                "FT_ENGINE_JOBS = 1: an engine of one job shares nothing. Give at least 2, or 0 "
                "for no engines"
            )
        return self

    @model_validator(mode="after")
    def _whole_cluster(self) -> Settings:
        if self.storage and self.launcher != "kubernetes":
            raise ValueError(
                "FT_STORAGE needs FT_LAUNCHER = kubernetes: processes of this host, and Slurm's "
                "jobs, keep files in FT_HOME"
            )
        if self.launcher == "slurm":
            self._require_slurm()
        if self.launcher != "kubernetes":
            return self
        if self.pod_profile is None:
            raise ValueError(
                "FT_LAUNCHER = kubernetes needs FT_POD_PROFILE, the settings of worker pods"
            )
        if not self.database_url_file and not self.database_url.startswith("postgresql"):
            raise ValueError(
                "FT_LAUNCHER = kubernetes needs PostgreSQL in FT_DATABASE_URL: SQLite's locks do "
                "not work between hosts"
            )
        return self

    def _require_slurm(self) -> None:
        if self.slurm_profile is None:
            raise ValueError(
                "FT_LAUNCHER = slurm needs FT_SLURM_PROFILE, the settings of batch jobs"
            )
        if not (self.database_url or self.database_url_file):
            raise ValueError(
                "FT_LAUNCHER = slurm needs FT_DATABASE_URL: all nodes share the folder FT_HOME, "
                "where SQLite's locks may "
                "not work. Use PostgreSQL, or sqlite:////PATH of a file on this host's own disk"
            )

    @property
    def inference_urls(self) -> list[str]:
        """URLs of all replicas, without a slash at the end."""
        return _separated(self.inference_url)

    @property
    def teacher_urls(self) -> list[str]:
        """URLs of all servers that teach, without a slash at the end."""
        return _separated(self.teacher_url)

    @property
    def seats(self) -> int:
        """Most jobs that an engine trains at once; 0: there are no engines."""
        return (
            (ENGINE_JOBS if self.launcher == "local" else 0)
            if self.engine_jobs is None
            else self.engine_jobs
        )

    @property
    def previews(self) -> bool:
        """Whether this service answers chat completions itself."""
        return self.preview != "off" and self.launcher == "local" and not self.inference_url

    def resolved_database_url(self) -> str:
        """Return the URL to connect to.

        Raises SpecError if FT_DATABASE_URL_FILE cannot be read, or is empty.
        """
        if path := self.database_url_file:
            try:
                url = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SpecError(
                    f"FT_DATABASE_URL_FILE = {path}: {error}", param="FT_DATABASE_URL_FILE"
                ) from None
            if not url:
                raise SpecError(
                    f"FT_DATABASE_URL_FILE = {path}: the file is empty.",
                    param="FT_DATABASE_URL_FILE",
                )
            return url
        return self.database_url or f"sqlite:///{self.home / 'ft.db'}"

    def model_folders(self) -> list[Path]:
        return self.models or [self.home / "models"]

    def without_paths(self, text: str) -> str:
        """Return a text for a user without the paths of this host's folders: of a base its name is
        left, of a file in FT_HOME its path there.
        """
        names = dict.fromkeys(self.model_folders(), "FT_MODELS") | {self.home: "FT_HOME"}
        names |= {folder.resolve(): name for folder, name in names.items()}
        for folder in sorted(names, key=lambda folder: len(folder.parts), reverse=True):
            if folder != folder.parent:
                text = text.replace(f"{folder}/", "").replace(str(folder), names[folder])
        return text

    @property
    def files_dir(self) -> Path:
        return self.home / "files"

    @property
    def uploads_dir(self) -> Path:
        """Parts of incomplete uploads."""
        return self.home / "uploads"

    @property
    def runs_dir(self) -> Path:
        return self.home / "runs"


def refuse_misspelt(names: Iterable[str]) -> None:
    """Raise SpecError for the name of an environment variable that is nearly one of a setting, and
    would be ignored. Other names that begin with FT_ may be anybody's.
    """
    settings = [f"FT_{name.upper()}" for name in Settings.model_fields]
    known = {*settings, *OTHER_VARIABLES, *_OF_OTHERS}
    for name in sorted(names):
        if not name.startswith("FT_") or name in known:
            continue
        close = get_close_matches(name, (*settings, *OTHER_VARIABLES), n=1, cutoff=_MISSPELT)
        if close:
            raise SpecError(
                f"{name} is no setting: did you mean {close[0]}? Else unset it, or give it a name "
                "that does not begin with FT_.",
                param=name,
            )
