"""Keys that have ended, and keys of scope read, on every route."""

from __future__ import annotations

import pytest

from ft_service.store.records import NewKey
from tests.support.rest.described import MAKES, ask, filled, operations, tenant
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service

pytestmark = pytest.mark.usefixtures("examined_by_one_process")


@pytest.fixture
def theirs(service: Service) -> dict[str, str]:
    """Everything that the first tenant has. Names hold a mark."""
    return tenant(service, "default", service.key)


def test_a_key_that_has_ended_opens_nothing(
    service: Service, theirs: dict[str, str], subtests: pytest.Subtests
) -> None:
    store = service.store
    revoked, secret = store.keys.create_key(NewKey(project_id="default", name="k", scope="admin"))
    store.keys.revoke_key("default", revoked.id)
    expired = store.keys.create_key(
        NewKey(project_id="default", name="k", scope="admin", expires_at=store.now() - 1)
    )[1]
    project = store.projects.create_project(name="ended", organization="local")
    archived = store.keys.create_key(NewKey(project_id=project.id, name="k", scope="admin"))[1]
    store.projects.archive_project(project.id)
    for method, path in operations(service, keyed=True):
        for kind, key in (("revoked", secret), ("expired", expired), ("archived", archived)):
            with subtests.test(method=method, path=path, kind=kind):
                answer = ask(service, method, filled(path, theirs), key)
                assert check_error(answer, 401)["code"] == "invalid_api_key"


def test_a_key_of_scope_read_changes_nothing(
    service: Service, theirs: dict[str, str], subtests: pytest.Subtests
) -> None:
    read = service.store.keys.create_key(NewKey(project_id="default", name="k", scope="read"))[1]
    for method, path in operations(service, keyed=True):
        with subtests.test(method=method, path=path):
            if path in MAKES:
                continue
            answer = ask(service, method, filled(path, theirs), read)
            if path == "/v1/sign_in_links":
                assert answer.status_code == 200, "a session may no more than its key"
            elif path == "/v1/device_sign_ins/key":
                assert answer.status_code == 400, "it ends a sign-in, and this key is none"
            elif (
                method != "GET"
                or path.startswith(("/v1/organization/", "/v1/keys", "/v1/pulls"))
                or path.endswith("/permissions")
            ):
                assert check_error(answer, 403)["code"] == "insufficient_permissions"
            else:
                assert answer.status_code in (200, 400, 404), answer.text
