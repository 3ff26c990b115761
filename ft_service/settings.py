"""The service's settings: environment variables with the prefix FT_, read once, in `main`, and passed down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """Every field is an environment variable: `home` is FT_HOME.

    FT_CACHE, FT_CACHE_BYTES (ft_service/bases/cache_folder.py), FT_TOKENS (ft_service/data/token_folder.py) and
    FT_CHECKPOINT_ADAPTERS (workers/output/saver.py) are not here: they are the workers'; supervisors pass them on. Which other
    variables child processes get, FT_PASS_ENVIRONMENT among them, says ft_service/host/environment.py.
    """

    model_config = SettingsConfigDict(env_prefix="FT_", frozen=True, extra="ignore")

    home: Path = Path("~/.ft")
    """State: database, uploaded files, run directories, credentials."""
    database_url: str = ""
    """SQLAlchemy URL; empty: SQLite in FT_HOME. PostgreSQL: postgresql+psycopg://user:password@host/name."""
    database_url_file: Path | None = None
    """File that holds the URL, for a password kept out of the environment."""
    models: Annotated[list[Path], NoDecode] = []
    """Folders of base models in Hugging Face layout, separated as in PATH; empty: FT_HOME/models."""
    model_aliases: Path | None = None
    """YAML file: name that clients send → name of a base."""
    storage: str = Field(default="", pattern=r"^((s3|gs)://.+)?$")
    """Object storage for run directories and files: s3://bucket/prefix or gs://bucket/prefix, with the credentials that s3fs or
    gcsfs find. Empty: they are in FT_HOME, which pods and other hosts must share. Not with FT_LAUNCHER = local."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Where `ft reconcile` shows Prometheus its counters, without a key; None: nowhere. `ft serve` has /metrics for them."""
    launcher: Literal["local", "kubernetes", "agents"] = "local"
    """Where jobs run: as processes of this host, as pods of a cluster, or on several hosts with an agent each (`ft agent`)."""
    host_lease_seconds: float = Field(default=30.0, ge=5, le=3600)
    """For how long the agent of a host may be silent before its jobs go on elsewhere. The same for all processes."""
    pod_profile: Path | None = None
    """YAML file: how worker pods look. Needed by FT_LAUNCHER = kubernetes."""
    bootstrap_key_file: Path | None = None
    """File whose content becomes the first admin key, instead of a random one."""
    organization: str = Field(default="local", pattern=r"^[a-z0-9-]{1,40}$")
    """Name of the organisation in tuned model names."""
    bind: str = "127.0.0.1"
    """Address the server listens on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free port; the chosen one is printed and written to FT_HOME/server.json."""
    max_streams: int = Field(default=100, ge=1)
    """Streams of events or logs that a key follows at once, at each server."""
    max_connections: int = Field(default=1000, ge=16)
    """Connections that the server keeps at once; fewer where the process may open fewer files (ulimit -n)."""
    page: Literal["on", "off"] = "on"
    """The page for browsers below `/`, and their sessions; off: only the REST API."""
    slots: int | None = Field(default=None, ge=1, le=1024)
    """Ranks this host runs at once; None: its GPUs, or without a GPU its processors (at least 2)."""
    preempt_after_minutes: float | None = Field(default=None, ge=0)
    """Minutes that a job holds its slots before one of higher priority may take them: it stops at a checkpoint and is queued
    again, so that this is also how often it can happen to it. None: nobody's slots are taken."""
    max_file_bytes: int = Field(default=512 * 1024**2, ge=1)
    """Largest file uploaded in one request."""
    max_upload_bytes: int = Field(default=8 * 1024**3, ge=1)
    """Largest file uploaded in parts."""
    result_files_plain: bool = False
    """Serve metrics files as plain CSV instead of base64, which existing OpenAI scripts decode."""
    webhook_allow_private: bool = False
    """Deliver webhooks to private addresses and by plain HTTP too. Users can then make the server send requests inside."""
    inference_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Base URL (with /v1) of an OpenAI-compatible server that serves the tuned models by their names: chat completions are
    passed on to it. Several replicas of one: separated by commas. Empty: they are answered here (preview), or refused."""
    adapters: Path | None = None
    """Folder that the inference server sees under the same path: the adapter of every job that succeeds is put there, named as
    the tuned model, loaded by every replica of inference_url and verified. None: that is the operator's."""
    preview: Literal["auto", "on", "off"] = "auto"
    """Answer chat completions for bases and tuned models by a process of this host, where no inference_url is set: a preview,
    to try them, and no serving engine. auto: where jobs run as processes of this host too, and the server moves them."""
    preview_idle_seconds: float = Field(default=600.0, gt=0)
    """After so long without a request that process ends."""
    inference_api_key: SecretStr | None = None
    """What that server wants as its key; None: nothing."""
    wandb_api_key: SecretStr | None = None
    """Key for Weights & Biases, with which the metrics of jobs with `integrations` are sent there; None: such jobs are
    refused. Needs the extra `wandb`."""
    wandb_base_url: str = Field(default="https://api.wandb.ai", pattern=r"^https?://.+$")
    """Where that is; a W&B server of your own, perhaps."""
    mlflow_tracking_uri: str | None = None
    """Where MLflow keeps runs (https://…, or file:///… of this host), to which the metrics of jobs that ask for it are sent;
    None: such jobs are refused. Needs the extra `mlflow`."""
    mlflow_token: SecretStr | None = None
    """What that server wants as a bearer token; None: nothing."""
    trackio_url: str | None = Field(default=None, pattern=r"^(https?://.+|file:///.+)$")
    """Where trackio keeps runs (https://… of a trackio server, or file:///… of this host), to which the metrics of jobs that
    ask for it are sent; None: such jobs are refused. Needs the extra `trackio`."""
    trackio_token: SecretStr | None = None
    """The write token of that server; None: nothing, as a folder needs none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug also logs the health checks, the scrapes of /metrics, and what whoever watches a job asks every second."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """json: one object a line, on stderr; text: for people; auto: text on a terminal, json anywhere else."""
    metrics_open: bool = False
    """Answer /metrics without a key. It shows numbers of all projects, and no names."""
    keep_runs_days: float | None = Field(default=None, ge=0)
    """Days after a job's end that its run directory stays: then logs, checkpoints and adapter go, and the tuned model is
    deleted. None: until `ft prune`."""
    keep_checkpoints_days: float | None = Field(default=None, ge=0)
    """The same for its checkpoints alone."""
    keep_files_days: float | None = Field(default=None, ge=0)
    """Days after their creation that uploaded files and result files stay, unless an unfinished job needs them."""
    keep_cache_days: float | None = Field(default=None, ge=0)
    """Days since their last use that quantised bases stay in FT_CACHE, and the tokens of data files in FT_TOKENS."""
    warm_start: bool = False
    """Keep a process that has imported PyTorch and what else the workers need, from which a job's ranks are forked: it starts
    seconds sooner. Takes about half a gigabyte of memory while it waits."""
    stop_grace_seconds: float = Field(default=60.0, gt=0)
    """How long an attempt may take to checkpoint and leave when asked to, before it is killed."""

    @field_validator("wandb_api_key", "mlflow_tracking_uri", "mlflow_token", "trackio_url", "trackio_token", mode="before")
    @classmethod
    def _no_empty_key(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("models", mode="before")
    @classmethod
    def _split_path(cls, value: object) -> object:
        return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value

    @field_validator("home", "models", mode="after")
    @classmethod
    def _absolute(cls, value: Path | list[Path]) -> Path | list[Path]:
        if isinstance(value, list):
            return [path.expanduser().absolute() for path in value]
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _one_database_url(self) -> Settings:
        if self.database_url and self.database_url_file:
            raise ValueError("FT_DATABASE_URL and FT_DATABASE_URL_FILE are both set: keep one")
        return self

    @model_validator(mode="after")
    def _one_host_to_preview(self) -> Settings:
        if self.preview == "on" and self.launcher != "local":
            raise ValueError(
                "FT_PREVIEW = on needs FT_LAUNCHER = local: a cluster has no host of the service's own to answer on"
            )
        if self.preview == "on" and self.inference_url:
            raise ValueError("FT_PREVIEW = on and FT_INFERENCE_URL are both set: one of them answers. Keep one")
        return self

    @model_validator(mode="after")
    def _whole_cluster(self) -> Settings:
        if self.launcher == "local":
            if self.storage:
                raise ValueError(
                    "FT_STORAGE needs FT_LAUNCHER = kubernetes or agents: processes of this host keep their files in FT_HOME"
                )
            return self
        if self.storage and (self.keep_runs_days, self.keep_checkpoints_days, self.keep_files_days) != (None, None, None):
            raise ValueError(
                "FT_KEEP_…_DAYS removes files of FT_HOME only; with FT_STORAGE use the storage's own lifecycle rules"
            )
        if self.pod_profile is None and self.launcher == "kubernetes":
            raise ValueError("FT_LAUNCHER = kubernetes needs FT_POD_PROFILE, which says how worker pods look")
        if not self.database_url_file and not self.database_url.startswith("postgresql"):
            raise ValueError(
                f"FT_LAUNCHER = {self.launcher} needs PostgreSQL in FT_DATABASE_URL: SQLite's locks do not work between hosts"
            )
        return self

    @property
    def inference_urls(self) -> list[str]:
        """Of every replica, without a slash at the end."""
        return [url.strip().rstrip("/") for url in self.inference_url.split(",") if url.strip()]

    @property
    def previews(self) -> bool:
        """Whether chat completions are answered here."""
        return self.preview != "off" and self.launcher == "local" and not self.inference_url

    def resolved_database_url(self) -> str:
        """The URL to connect to. Raises OSError if FT_DATABASE_URL_FILE cannot be read."""
        if self.database_url_file:
            return self.database_url_file.read_text().strip()
        return self.database_url or f"sqlite:///{self.home / 'ft.db'}"

    def model_folders(self) -> list[Path]:
        return self.models or [self.home / "models"]

    @property
    def files_dir(self) -> Path:
        return self.home / "files"

    @property
    def uploads_dir(self) -> Path:
        """Parts of uploads that are not complete yet."""
        return self.home / "uploads"

    @property
    def runs_dir(self) -> Path:
        return self.home / "runs"
