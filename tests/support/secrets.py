"""Environment variables of a server's host that no child process has any business with."""

from __future__ import annotations

NAMES = (
    *(
        "FT_API_KEY",
        "FT_DATABASE_URL",
        "FT_INFERENCE_API_KEY",
        "FT_TEACHER_API_KEY",
        "FT_MLFLOW_TOKEN",
        "FT_MLFLOW_TRACKING_URI",
        "FT_TRACKIO_TOKEN",
    ),
    *(
        "FT_TRACKIO_URL",
        "FT_WANDB_API_KEY",
        "PGPASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "WANDB_API_KEY",
    ),
    *(
        "MLFLOW_TRACKING_PASSWORD",
        "GITHUB_TOKEN",
        "OPENAI_API_KEY",
        "NVIDIA_API_KEY",
        "HTTPS_PROXY",
    ),
)
SECRETS = dict.fromkeys(NAMES, "secret-of-the-server")
