"""What is wrong is a 4xx in OpenAI's error body, names its field, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from api.wire.error_views import error_body
from ft_service.errors import ConflictError, SpecError, UnavailableError
from ft_service.settings import Settings
from tests.support.rest.refusals import MALFORMED, check_error
from tests.support.rest.service import Service


def test_a_malformed_body_is_a_400_that_names_the_field_and_stores_nothing(
    service: Service, training_file: str, subtests: pytest.Subtests
) -> None:
    for change, param in MALFORMED:
        with subtests.test(change=change):
            body = {"model": "tiny", "training_file": training_file, **change}
            answer = service.http("POST", "/v1/fine_tuning/jobs", content=json.dumps(body))

            error = check_error(answer, 400)
            assert (error["param"], error["type"]) == (param, "invalid_request_error")
            assert param.rsplit(".", 1)[-1] in error["message"]
    for name in ("model", "training_file"):
        body = {"model": "tiny", "training_file": training_file}
        del body[name]
        assert (
            check_error(service.http("POST", "/v1/fine_tuning/jobs", json=body), 400)["param"]
            == name
        )
    assert service.store.jobs.list_jobs("default").data == []


def test_what_openai_has_and_this_service_has_not_is_refused_by_name(
    client: openai.OpenAI, training_file: str
) -> None:
    refused: list[tuple[dict[str, Any], str, str]] = [
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
            "integrations",
            "FT_WANDB_API_KEY",
        ),
        ({"method": {"type": "tinker"}}, "method.type", "Tinker"),
    ]
    for more, param, word in refused:
        with pytest.raises(openai.BadRequestError, match=word) as caught:
            client.fine_tuning.jobs.create(model="tiny", training_file=training_file, **more)
        assert (caught.value.param, caught.value.code) == (param, "not_available")
    assert (
        client.fine_tuning.jobs.create(
            model="tiny", training_file=training_file, integrations=[]
        ).integrations
        == []
    )


def test_limits_are_named_with_their_numbers(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(
            model="tiny",
            training_file=training_file,
            extra_body={"distributed": {"nproc_per_node": 5}},
        )
    assert "= 5: this host runs at most 4 ranks" in caught.value.message

    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(model="gpt-9", training_file=training_file)
    assert "There are: meta-llama/Llama-3.2-1B, tiny." in caught.value.message
    assert caught.value.code == "model_not_found"


KEYLESS = {
    ("get", "/livez"),
    ("get", "/readyz"),
    # How a key is got by `ft login`.
    ("post", "/v1/device_sign_ins"),
    ("post", "/v1/device_sign_ins/key"),
}


def test_without_a_valid_key_nothing_but_health_and_sign_in_answers(service: Service) -> None:
    paths = service.http("GET", "/openapi.json").json()["paths"]
    assert len(paths) > 10
    for path, methods in paths.items():
        for method in methods:
            if (method, path) in KEYLESS:
                continue
            for authorization in ("", "Basic x", "Bearer", "Bearer no", b"Bearer \xff"):
                answer = service.http(
                    method.upper(), path, headers={"authorization": authorization}
                )
                assert check_error(answer, 401)["code"] == "invalid_api_key", path
                assert answer.headers["www-authenticate"] == "Bearer"


def test_the_client_raises_its_own_classes(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        service.client("ft-wrong-key-wrong-key").models.list()
    assert "wrong-key" not in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.fine_tuning.jobs.retrieve("ftjob-none")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as after:
        client.fine_tuning.jobs.list(after="ftjob-none")
    assert after.value.param == "after"


def test_unknown_routes_and_wrong_methods_have_the_same_body(service: Service) -> None:
    for path in ("/v2/files", "/v1/files/", "/v1/fine_tuning", "/v1"):
        assert check_error(service.http("GET", path), 404)["code"] == "unknown_url"
    answer = service.http("PUT", "/v1/files")
    assert check_error(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "GET, POST"


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("", "it is /v1/models here. The path of a client's base_url is /v1."),
        ("/v1/v1", "it is /v1/models here. The path of a client's base_url is /v1."),
        ("/openai/v1/v1", "it is /v1/models here. The path of a client's base_url is /v1."),
        ("/v2", "/docs lists them."),
    ],
)
def test_a_client_with_another_address_is_told_the_right_one(
    service: Service, address: str, instead: str
) -> None:
    """Also where the page has an address of this name, whose sign-in the client would read as the
    answer.
    """
    client = openai.OpenAI(base_url=f"{service.url}{address}", api_key=service.key, max_retries=0)
    with pytest.raises(openai.NotFoundError, match=re.escape(instead)) as caught:
        client.models.list()
    assert caught.value.code == "unknown_url"


def test_other_routes_of_openai_are_refused_with_what_serves_their_purpose(
    service: Service, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="fine-tuning is /v1/fine_tuning/jobs"):
        client.get("/fine-tunes", cast_to=dict)
    error = check_error(service.http("GET", "/v1/files/"), 404)
    assert error["message"].endswith("it is /v1/files here, without a slash at its end.")


def test_a_query_parameter_that_a_route_does_not_have_is_refused(
    service: Service, client: openai.OpenAI
) -> None:
    with pytest.raises(
        openai.BadRequestError, match="it takes after, base, limit, metadata, project, status"
    ) as caught:
        client.fine_tuning.jobs.list(extra_query={"order": "asc"})
    assert (caught.value.param, caught.value.code) == ("order", "unknown_parameter")
    assert (
        check_error(service.http("GET", "/v1/fine_tuning/jobs/x?include=a"), 400)["param"]
        == "include"
    )
    assert list(client.fine_tuning.jobs.list(extra_query={"metadata[a]": "b", "limit": 5})) == []


def test_allow_names_every_method_of_a_path(service: Service) -> None:
    paths = service.http("GET", "/openapi.json").json()["paths"]
    for path, methods in paths.items():
        answer = service.http("PATCH", path)
        assert check_error(answer, 405)["code"] == "method_not_allowed"
        named = set(answer.headers["allow"].split(", "))
        assert named >= {method.upper() for method in methods}, path
        assert "PATCH" not in named
        for method in named:
            answer = service.http(method, path, headers={"authorization": ""})
            known = {200, 400, 404} if (method.lower(), path) in KEYLESS else {200, 401}
            assert answer.status_code in known, (path, method)


LIST_PARAMETERS = [
    ("fine_tuning/jobs?limit=0", "limit"),
    ("fine_tuning/jobs?limit=101", "limit"),
    ("fine_tuning/jobs?limit=many", "limit"),
    ("fine_tuning/jobs?metadata=x", "metadata"),
    ("fine_tuning/jobs?metadata=null&metadata[a]=1", "metadata"),
    ("fine_tuning/jobs?metadata[]=1", "metadata"),
    ("fine_tuning/jobs/x/events?stream=perhaps", "stream"),
    ("fine_tuning/jobs?metadata[a]=1&metadata[a]=2", "metadata[a]"),
    ("files?order=up", "order"),
    (f"files/file-x/samples?model=tiny&after={2**63 - 1}", "after"),
    (f"fine_tuning/jobs/x/samples?after={10**30}", "after"),
    ("files?limit=10001", "limit"),
    ("files?after=file-none", "after"),
]


def test_wrong_list_parameters_are_named(service: Service, subtests: pytest.Subtests) -> None:
    for query, param in LIST_PARAMETERS:
        with subtests.test(query=query):
            assert check_error(service.http("GET", f"/v1/{query}"), 400)["param"] == param


def test_model_ids_hold_slashes_and_colons(service: Service, client: openai.OpenAI) -> None:
    assert client.models.retrieve("meta-llama/Llama-3.2-1B").id == "meta-llama/Llama-3.2-1B"
    alias = client.models.retrieve("gpt-4o-mini-2024-07-18")
    assert (alias.id, (alias.model_extra or {})["root"]) == ("gpt-4o-mini-2024-07-18", "tiny")
    for missing in ("meta-llama/none", "ft:tiny:local::none", "..%2Fetc", "%2Fetc"):
        check_error(service.http("GET", f"/v1/models/{missing}"), 404)
    assert service.http("GET", "/v1/models/meta-llama%2FLlama-3.2-1B").json()["object"] == "model"


def test_chat_completions_say_what_to_do_instead(service: Service, client: openai.OpenAI) -> None:
    for model, code in (("tiny", "model_not_served"), ("ft:tiny:local::none", "model_not_found")):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hi"}]
            )
        assert (caught.value.param, caught.value.code) == ("model", code)
    check_error(service.http("POST", "/v1/chat/completions", json=[]), 400)


def test_a_bug_tells_nothing_of_the_inside_and_is_not_retried(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.store.jobs, "list_jobs", lambda *_, **__: 1 / 0)
    answer = service.http("GET", "/v1/fine_tuning/jobs")

    error = check_error(answer, 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "division" not in answer.text
    assert answer.headers["x-request-id"] in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "division by zero" in caplog.text


def test_what_may_pass_may_be_retried(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with(error: Exception) -> None:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(service.store.jobs, "list_jobs", raise_it)

    fail_with(UnavailableError("The database is away."))
    answer = service.http("GET", "/v1/fine_tuning/jobs")
    check_error(answer, 503)
    assert "x-should-retry" not in answer.headers
    fail_with(ConflictError("Somebody was faster."))
    answer = service.http("GET", "/v1/fine_tuning/jobs")
    assert check_error(answer, 409)["code"] == "conflict"
    assert "x-should-retry" not in answer.headers


def test_the_documentation_works_without_a_network(service: Service) -> None:
    page = service.http("GET", "/docs").text
    document = service.http("GET", "/openapi.json").json()

    assert "://" not in page.replace("http://www.w3.org", "")
    assert "JobRequest" in document["components"]["schemas"]
    assert "HTTPBearer" in document["components"]["securitySchemes"]
    references = {
        part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]
    }
    assert references <= set(document["components"]["schemas"])


def test_an_error_within_a_stream_names_no_path_of_the_host(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, models=[tmp_path / "bases"])
    error = SpecError(f"The base in {tmp_path}/bases/org/tiny is damaged.", param="model")
    told = error_body(settings, error)["error"]
    assert (told["message"], told["param"]) == ("The base in org/tiny is damaged.", "model")
