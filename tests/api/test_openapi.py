"""The OpenAPI document says what the service does, and what of it OpenAI's API does not have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import hypothesis
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from hypothesis.errors import Unsatisfiable
from openai.types import fine_tuning, webhooks
from openai.types.admin.organization import Project
from openai.types.admin.organization.projects import ProjectAPIKey
from openai.types.fine_tuning.checkpoints import PermissionListResponse
from openai.types.fine_tuning.job_create_params import JobCreateParams
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from openai.types.uploads import UploadPart
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import NewKey
from tests.support.rest.receiver import Receiver, receiving
from tests.support.rest.service import Service, put, run_dir

pytestmark = pytest.mark.usefixtures("examined_by_one_process")

MARK = "x-beyond-openai"
CHECKS = [
    not_a_server_error,
    response_schema_conformance,
    content_type_conformance,
    status_code_conformance,
]
SAME: dict[str, Any] = {
    "JobView": fine_tuning.FineTuningJob,
    "EventView": fine_tuning.FineTuningJobEvent,
    "CheckpointView": FineTuningJobCheckpoint,
    "FileView": openai.types.FileObject,
    "ModelView": openai.types.Model,
    "UploadView": openai.types.Upload,
    "UploadPartView": UploadPart,
    "PermissionView": PermissionListResponse,
    "WebhookView": webhooks.WebhookEndpoint,
    "WebhookSecretView": webhooks.WebhookEndpointWithSecret,
    "ProjectView": Project,
    "ApiKeyView": ProjectAPIKey,
    "WebhookTestView": webhooks.WebhookEndpointTestResult,
}


@pytest.fixture
def configure(configure: dict[str, Any]) -> dict[str, Any]:
    return configure | {"webhook_allow_private": True}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def document(service: Service) -> dict[str, Any]:
    return service.http("GET", "/openapi.json").json()


def test_answers_have_openais_fields_and_mark_the_others(document: dict[str, Any]) -> None:
    for view, theirs in SAME.items():
        assert issubclass(theirs, BaseModel)
        properties = document["components"]["schemas"][view]["properties"]
        assert set(theirs.model_fields) <= set(properties), view
        marked = {name for name, schema in properties.items() if schema.get(MARK)}
        assert marked == set(properties) - set(theirs.model_fields), view


def test_a_create_body_marks_what_openai_does_not_take(document: dict[str, Any]) -> None:
    theirs = set(JobCreateParams.__annotations__)
    properties = document["components"]["schemas"]["JobRequest"]["properties"]
    assert theirs <= set(properties)
    assert {name for name, schema in properties.items() if schema.get(MARK)} == set(
        properties
    ) - theirs


def test_routes_that_the_client_does_not_know_are_marked(document: dict[str, Any]) -> None:
    source = "".join(
        path.read_text() for path in (Path(openai.__file__).parent / "resources").rglob("*.py")
    )
    known = {re.sub(r"{\w+}", "{}", path) for path in re.findall(r'"(/[a-z_/{}]+)"', source)}
    deletes = re.findall(r'self\._delete\(\s*(?:path_template\(\s*)?"(/[a-z_/{}]+)"', source)
    deleted = {re.sub(r"{\w+}", "{}", path) for path in deletes}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            ours = re.sub(r"{\w+}", "{}", path.removeprefix("/v1")) not in (
                deleted if method == "delete" else known
            )
            ours = ours or (method, path) == ("post", "/v1/fine_tuning/jobs/{job_id}")  # a name
            assert operation.get(MARK, False) is ours, path
            assert operation.get("description", "").startswith("Not in OpenAI's API.") is ours, path


def test_limits_are_said_by_the_names_of_json_schema(document: dict[str, Any]) -> None:
    def check(schema: Any, place: str) -> None:
        if isinstance(schema, dict):
            assert not {"gt", "ge", "lt", "le"} & set(schema) or schema.get("type") not in (
                "number",
                "integer",
            ), place
            for name, member in schema.items():
                check(member, f"{place}.{name}")
        elif isinstance(schema, list):
            for member in schema:
                check(member, place)

    check(document["components"]["schemas"], "")
    lora = document["components"]["schemas"]["LoraOptions"]["properties"]
    assert (lora["lora_alpha"]["exclusiveMinimum"], lora["lora_alpha"]["maximum"]) == (0, 4096)
    assert (lora["lora_dropout"]["minimum"], lora["lora_dropout"]["exclusiveMaximum"]) == (0, 1)


def test_a_cursor_is_not_empty_and_the_document_says_so(
    service: Service, document: dict[str, Any]
) -> None:
    cursors = 0
    for path, operations in document["paths"].items():
        for parameter in operations.get("get", {}).get("parameters", ()):
            schemas = [parameter["schema"], *parameter["schema"].get("anyOf", ())]
            if parameter["name"] == "after" and any(
                schema.get("type") == "string" for schema in schemas
            ):
                cursors += 1
                assert any(schema.get("minLength") == 1 for schema in schemas), path
                if "{" not in path:
                    answer = service.http("GET", path, params={"after": ""})
                    assert (answer.status_code, answer.json()["error"]["param"]) == (
                        400,
                        "after",
                    ), path
    assert cursors > 8


def test_whole_numbers_may_be_written_with_a_fraction_of_nothing(
    service: Service, training_file: str
) -> None:
    body = (
        f'{{"model": "tiny", "training_file": "{training_file}", "seed": 331.0, "priority": -0.0, '
    )
    body += (
        '"training": {"n_epochs": 3.0, "learning_rate": 1.0}, "lora": {"r": 8e0, '
        '"rank_pattern": {"q_proj": 4.0}}}'
    )
    made = service.http("POST", "/v1/fine_tuning/jobs", content=body).json()
    assert (made["seed"], made["priority"], made["lora"]["r"], made["lora"]["rank_pattern"]) == (
        331,
        0,
        8,
        {"q_proj": 4},
    )
    assert made["training"]["learning_rate"] == 1.0
    refused = service.http("POST", "/v1/fine_tuning/jobs", content=body.replace("331.0", "331.5"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


def prepared(
    service: Service, client: openai.OpenAI, receiver: Receiver, file_id: str
) -> dict[str, str]:
    """Values of path parameters that exist."""
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id
    job = put(
        service,
        job_id,
        checkpoints=(5,),
        state=State.SUCCEEDED,
        reason=Reason.SUCCEEDED,
        attempt=1,
        finished_at=1e9,
    )
    run_dir(service, job_id).put("adapter/adapter_config.json", b"{}")
    run_dir(service, job_id).put("attempts/1/logs/supervisor.log", b"first\n")
    upload = client.uploads.create(
        bytes=9, filename="a.jsonl", mime_type="text/plain", purpose="fine-tune"
    )
    name = job.spec.tuned_name
    granted = client.fine_tuning.checkpoints.permissions.create(name, project_ids=["default"]).data[
        0
    ]
    endpoint = client.webhooks.create(
        name="a", url=receiver.url, event_types=["fine_tuning.job.failed"]
    )
    return {
        "job_id": job_id,
        "file_id": file_id,
        "upload_id": upload.id,
        "model": name,
        "fine_tuned_model_checkpoint": name,
        "permission_id": granted.id,
        "webhook_endpoint_id": endpoint.id,
        "project_id": "default",
        "api_key_id": service.store.keys.create_key(
            NewKey(project_id="default", name="spare", scope="read")
        )[0].id,
    }


@pytest.mark.parametrize(
    "examples", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_every_answer_is_as_described_whatever_is_sent(
    service: Service,
    client: openai.OpenAI,
    receiver: Receiver,
    document: dict[str, Any],
    training_file: str,
    subtests: pytest.Subtests,
    examples: int,
) -> None:
    """`examples`: per operation, of what fits the description and of what does not."""
    existing = prepared(service, client, receiver, training_file)
    schema = schemathesis.openapi.from_dict(document)
    answered: set[str] = set()
    limits = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
    )
    operations = [cast(Any, found).ok() for found in schema.get_all_operations()]
    # What deletes or ends something comes last, so that the others find it.
    for operation in sorted(
        operations, key=lambda found: (found.method == "delete", found.path.endswith("cancel"))
    ):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @limits
            @hypothesis.given(
                case=operation.as_strategy(generation_mode=mode),
                real=strategies.just(True)
                if mode is GenerationMode.POSITIVE
                else strategies.booleans(),
            )
            def check(case: Any, real: bool) -> None:
                if real:
                    case.path_parameters = {
                        **(case.path_parameters or {}),
                        **existing_for(case, existing),
                    }
                answer = case.call(
                    base_url=service.url,
                    headers={"authorization": f"Bearer {service.key}"},
                    timeout=30,
                )
                case.validate_response(answer, checks=CHECKS)
                if answer.status_code == 200:
                    answered.add(case.operation.label)

            with (
                subtests.test(operation=operation.label, mode=mode.name),
                contextlib.suppress(Unsatisfiable),
            ):
                # Unsatisfiable: an operation that takes nothing cannot be given something wrong
                check()
    assert len(answered) >= 20, "most operations were seen to succeed"


def existing_for(case: Any, existing: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in existing.items() if f"{{{name}}}" in case.operation.path}
