"""Rights to object storage that the policy in `deploy/` gives to workers, and the requests that need
them.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.storage.object_store import ObjectStore

POLICY = Path(__file__).parents[2] / "deploy/kubernetes/overlays/s3/worker-policy.json"


ACTIONS = {
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
}
"""Of S3's API, by what IAM calls the right to it."""


def allowed(bucket: str, action: str, key: str) -> bool:
    """By the policy in `deploy/`, of a worker: an object's key, or what a listing begins with."""
    for statement in json.loads(POLICY.read_text().replace("your-bucket", bucket))["Statement"]:
        patterns = [
            resource.removeprefix(f"arn:aws:s3:::{bucket}/") for resource in statement["Resource"]
        ]
        if action == "s3:ListBucket":
            patterns = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix", [])
        if action in statement["Action"] and any(
            fnmatch.fnmatchcase(key, pattern) for pattern in patterns
        ):
            return True
    return False


def requests_of(workers: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The requests from now on, as (action, key), in order."""
    asked: list[tuple[str, str]] = []
    real = workers._fs._call_s3

    async def noted(method: str, *arguments: Any, **options: Any) -> Any:
        named = {
            name: value
            for given in (*arguments, options)
            for name, value in dict(given or {}).items()
        }
        asked.append((ACTIONS[method], named.get("Key", named.get("Prefix", ""))))
        return await real(method, *arguments, **options)

    monkeypatch.setattr(workers._fs, "_call_s3", noted)
    return asked
