"""A local S3 for tests, with a bucket of its own for each."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer


@contextmanager
def local_s3() -> Iterator[dict[str, str]]:
    """The environment in which s3fs finds it; it is set for this process too."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, environment):
            yield environment
    finally:
        server.stop()


def new_bucket() -> str:
    """URL of a prefix in an empty bucket."""
    name = f"test-{secrets.token_hex(4)}"
    # A file system of its own would begin with half a second for the description of the service.
    request = Request(
        f"{os.environ['AWS_ENDPOINT_URL']}/{name}", method="PUT", headers={"Content-Length": "0"}
    )
    with urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    return f"s3://{name}/ft"
