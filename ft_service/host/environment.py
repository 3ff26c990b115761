"""Environment of child processes: an allow-list of names, which keeps the server's secrets from
them.

Names that are not listed are never passed on: keys of other services, passwords of databases,
tokens of hubs. An operator can add names for the workers in FT_PASS_ENVIRONMENT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PASS_ENVIRONMENT = "FT_PASS_ENVIRONMENT"
"""Variable with the operator's additions: names, or prefixes that end with `*`, separated by commas
or spaces.
"""

BASIC = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "HOSTNAME",
        "SHELL",
        "TZ",
        "TMPDIR",
        "TEMP",
        "TMP",
        "TERM",
        "COLUMNS",
    ),
    *(
        "LANG",
        "LANGUAGE",
        "LC_*",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHON*",
        "MALLOC_*",
    ),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
)
"""Names that any process needs to start and to find its files."""
COMPUTE = (
    *(
        "CUDA_*",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_*",
        "CUDNN_*",
    ),
    *(
        "HIP_*",
        "HSA_*",
        "ROCR_*",
        "ROCM_*",
        "MIOPEN_*",
        "NCCL_*",
        "GLOO_*",
        "UCX_*",
        "FI_*",
        "OFI_*",
        "MLX5_*",
    ),
    *(
        "TORCH_*",
        "TORCHINDUCTOR_*",
        "TORCHELASTIC_*",
        "PYTORCH_*",
        "TRITON_*",
        "BNB_*",
        "BITSANDBYTES_*",
    ),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_*", "DNNL_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *(
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_HUB_DISABLE_*",
        "TRANSFORMERS_OFFLINE",
        "TRANSFORMERS_VERBOSITY",
    ),
)
"""Names that configure PyTorch, its libraries and the network between ranks."""
SERVICE = (
    *(
        "FT_HOME",
        "FT_CACHE",
        "FT_CACHE_BYTES",
        "FT_TOKENS",
        "FT_CHECKPOINT_ADAPTERS",
        "FT_STOP_GRACE_SECONDS",
        "FT_IMAGE_BYTES",
        "FT_LINE_IMAGES",
    ),
    *("FT_TEST_RUN", PASS_ENVIRONMENT, "JOB_COMPLETION_INDEX", "POD_IP"),
)
"""Names that the service's child processes read.

FT_TEST_RUN marks processes started by a test run.
"""
NETWORK = (
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
    ),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Names that a process needs to reach servers, only for processes that do: a proxy's address may
contain a password.
"""
STORAGE = (*NETWORK, "AWS_*", "GOOGLE_*", "CLOUDSDK_*", "GCE_METADATA_*", "FSSPEC_*", "S3_*")
"""Credentials of object storage, for processes that copy run directories."""
DATABASE = ("PG*",)
"""Names that libpq reads in addition to the URL, such as PGPASSWORD."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def child_environment(inherited: Mapping[str, str], *needs: str, **fixed: str) -> dict[str, str]:
    """Return the environment of a child process: what BASIC, COMPUTE, SERVICE, `needs` and
    FT_PASS_ENVIRONMENT name.

    `needs`: more names, such as NETWORK, STORAGE and DATABASE. `fixed`: variables with their
    values. A prefix in BASIC, COMPUTE or SERVICE, such as `NCCL_*`, does not match names that look
    like secrets (`NCCL_AUTH_TOKEN`).
    """
    requested = (*needs, *re.split(r"[,\s]+", inherited.get(PASS_ENVIRONMENT, "").strip()))
    usual = (*BASIC, *COMPUTE, *SERVICE)
    passed = {
        name: value
        for name, value in inherited.items()
        if is_named(name, requested)
        or (is_named(name, usual) and not (_SECRET.search(name) and name not in usual))
    }
    return passed | fixed


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a variable has one of these names, or matches a prefix that ends with `*`."""
    return any(
        name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))
        for pattern in patterns
    )
