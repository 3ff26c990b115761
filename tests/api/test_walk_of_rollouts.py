"""Who may call the model of a rollout: every route below /v1/rollouts, with every method, by every
kind of key but its own; and its own key at every other route. A route that is added is tried by
itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ft_service.agents.open_rollouts import KEY_PREFIX, OpenRollout, OpenRollouts
from ft_service.store.records import NewKey, Scope
from ft_service.tinker.names import KEY_PREFIX as TINKERS
from tests.support.agents import new_rollout
from tests.support.rest.described import OPEN, filled, operations
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service
from tests.support.rollout_loops import PlayedSampler

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "2 + 2"}]},
    "completions": {"prompt": "2 + 2"},
}
"""End of a path → what is answered there."""
MISSING = "rollout_none"


@pytest.fixture
def sampler() -> PlayedSampler:
    return PlayedSampler()


@pytest.fixture
def opened(service: Service, sampler: PlayedSampler) -> OpenRollouts:
    opened = OpenRollouts(service.url)
    parts: Any = {"preview": sampler, "rollouts": opened}
    service.app.state.services = replace(service.app.state.services, **parts)
    return opened


@pytest.fixture
def own(opened: OpenRollouts) -> OpenRollout:
    """The rollout that nobody else may call."""
    return begun(opened, "default")


def begun(opened: OpenRollouts, project_id: str) -> OpenRollout:
    rollout = new_rollout(project_id=project_id)
    opened.open(rollout)
    return rollout


def routes_of_rollouts(service: Service) -> list[str]:
    """Paths below /v1/rollouts."""
    found = sorted({path for _, path in operations(service) if path.startswith("/v1/rollouts/")})
    assert found == [f"/v1/rollouts/{{rollout_id}}/{end}" for end in sorted(BODIES)]
    return found


def keys_of_api(service: Service) -> Iterator[tuple[str, str, int]]:
    """Kind of a key of the API, the key, and the status of a POST with it: nobody who holds one is
    told whether there is such a rollout.
    """
    service.store.projects.ensure_project("same", "local")
    service.store.projects.ensure_project("rival", "rival")
    create = service.store.keys.create_key
    others: dict[str, dict[Scope, int]] = {
        "default": {"admin": 404, "submit": 404, "read": 403, "metrics": 403},
        "same": {"admin": 404, "read": 403},
        "rival": {"admin": 404, "read": 403},
    }
    for project_id, scopes in others.items():
        for scope, status in scopes.items():
            key = create(NewKey(project_id=project_id, name="k", scope=scope))[1]
            yield f"{scope} of {project_id}", key, status
    revoked, key = create(NewKey(project_id="default", name="k", scope="admin"))
    service.store.keys.revoke_key("default", revoked.id)
    yield "revoked", key, 401
    yield "as Tinker's clients send it", TINKERS + service.key, 401


def keys_of_rollouts(opened: OpenRollouts) -> Iterator[tuple[str, str, int]]:
    """As `keys_of_api`, of keys that are no keys of the API, or none at all."""
    yield "another rollout of the project", begun(opened, "default").key, 404
    yield "a rollout of another project", begun(opened, "rival").key, 404
    ended = begun(opened, "default")
    opened.close(ended)
    yield "a rollout that has ended", ended.key, 401
    yield "guessed", KEY_PREFIX + "guessed", 401
    yield "the prefix alone", KEY_PREFIX, 401
    yield "none", "", 401
    yield "its id", ended.id, 401


def ask(service: Service, method: str, path: str, key: str, **options: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body: Any = next((own for end, own in BODIES.items() if path.endswith(end)), {})
    sent: dict[str, Any] = {"json": body} if method in ("POST", "PUT", "PATCH") else {}
    url = f"{service.url}{path}"
    return service.connections.request(method, url, headers=headers, **sent, **options)


def test_no_key_but_its_own_calls_the_model_of_a_rollout(
    service: Service,
    opened: OpenRollouts,
    own: OpenRollout,
    sampler: PlayedSampler,
    subtests: pytest.Subtests,
) -> None:
    keys = [*keys_of_api(service), *keys_of_rollouts(opened)]
    for path in routes_of_rollouts(service):
        for kind, key, status in keys:
            with subtests.test(path=path, kind=kind):
                answer = ask(service, "POST", filled(path, {"rollout_id": own.id}), key)
                nothing = ask(service, "POST", filled(path, {"rollout_id": MISSING}), key)
                check_error(answer, status)
                assert answer.text.replace(own.id, MISSING) == nothing.text, "it is told apart"
                assert own.key not in answer.text
    assert (own.was_called, own.answered, own.refused.total()) == (False, [], 0)
    assert sampler.orders == []


def test_no_other_method_does_anything(
    service: Service, own: OpenRollout, sampler: PlayedSampler, subtests: pytest.Subtests
) -> None:
    """Also with the rollout's own key: POST alone is a route, and no path above one is."""
    above = ["/v1/rollouts", "/v1/rollouts/{rollout_id}", "/v1/rollouts/{rollout_id}/chat"]
    for path in (*routes_of_rollouts(service), *above):
        for method in METHODS:
            if method == "POST" and path not in above:
                continue
            with subtests.test(method=method, path=path):
                for key in (own.key, service.key, ""):
                    answer = ask(service, method, filled(path, {"rollout_id": own.id}), key)
                    assert answer.status_code in (401, 404, 405), answer.text
    assert (own.was_called, sampler.orders) == (False, [])


def test_the_key_of_a_rollout_opens_no_other_route(
    service: Service, own: OpenRollout, subtests: pytest.Subtests
) -> None:
    """Neither by `Authorization` nor by Azure's `api-key`, while its rollout is open."""
    values: dict[str, str] = defaultdict(lambda: "none", rollout_id=own.id)
    tried = 0
    for method, path in operations(service, keyed=True):
        if path.startswith("/v1/rollouts/"):
            continue
        with subtests.test(method=method, path=path):
            tried += 1
            answer = ask(service, method, filled(path, values), own.key)
            assert check_error(answer, 401)["code"] == "invalid_api_key"
    for path in OPEN:
        assert ask(service, "GET", path, own.key).status_code in (200, 401), path
    for path in ("/openai/v1/models", "/openai/models?api-version=2024-10-21"):
        answer = service.connections.get(service.url + path, headers={"api-key": own.key})
        assert answer.status_code == 401, path
    assert tried > 60
    assert own.refused.total() == 0


def test_a_rollout_is_closed_to_its_own_key_when_it_has_ended(
    service: Service, opened: OpenRollouts, own: OpenRollout, sampler: PlayedSampler
) -> None:
    """And open before: what the walk above is refused, its own key is answered."""
    for number, path in enumerate(routes_of_rollouts(service), 1):
        at = filled(path, {"rollout_id": own.id})
        assert ask(service, "POST", at, own.key).status_code == 200
        assert (len(own.answered), len(sampler.orders)) == (number, number)
    opened.close(own)
    for path in routes_of_rollouts(service):
        check_error(ask(service, "POST", filled(path, {"rollout_id": own.id}), own.key), 401)
    assert len(own.answered) == len(sampler.orders)
