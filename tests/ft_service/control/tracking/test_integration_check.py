from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ft_service.control.tracking.integration_check import refuse_unless_possible
from ft_service.control.tracking.metric_points import RunDescription
from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import Integration, JobRequest


def asking(**trackio: Any) -> JobRequest:
    given = [{"type": "trackio", "trackio": trackio}]
    return JobRequest.model_validate({"model": "m", "training_file": "f", "integrations": given})


def test_mlflow_is_refused_by_name_where_it_is_not_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def asking_for(*kinds: str) -> JobRequest:
        sections = {"mlflow": {"experiment": "tuning"}, "wandb": {"project": "p"}}
        given = [{"type": kind, kind: sections[kind]} for kind in kinds]
        return JobRequest.model_validate(
            {"model": "m", "training_file": "f", "integrations": given}
        )

    with pytest.raises(SpecError, match="FT_MLFLOW_TRACKING_URI"):
        refuse_unless_possible(asking_for("mlflow"), Settings())
    there = Settings(mlflow_tracking_uri="http://127.0.0.1:1")
    monkeypatch.setattr(
        "ft_service.control.tracking.integration_check.find_spec", lambda name: None
    )
    with pytest.raises(SpecError, match=r"pip install 'ft-service\[mlflow\]'"):
        refuse_unless_possible(asking_for("mlflow"), there)
    monkeypatch.setattr(
        "ft_service.control.tracking.integration_check.find_spec", lambda name: object()
    )
    refuse_unless_possible(asking_for("mlflow"), there)
    with pytest.raises(SpecError, match="FT_WANDB_API_KEY"):
        refuse_unless_possible(asking_for("mlflow", "wandb"), there)


def test_an_integration_has_the_section_of_its_type_alone() -> None:
    assert (
        RunDescription(
            id="a", project="p", entity=None, group=None, name=None, tags=None, config=None
        ).kind
        == "wandb"
    )
    given = {"type": "mlflow", "mlflow": {"experiment": "tuning", "name": None, "tags": []}}
    assert Integration.model_validate(given).model_dump() == given, (
        "OpenAI's own has no section of ours"
    )
    for wrong in (
        {**given, "wandb": {"project": "p"}},
        {"type": "wandb", "mlflow": given["mlflow"]},
    ):
        with pytest.raises(ValidationError, match="wandb"):
            Integration.model_validate(wrong)


def test_trackio_is_refused_by_name_where_it_is_not_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SpecError, match=r"address of a trackio server, nor a folder for it\. Set FT_TRACKIO_URL"
    ):
        refuse_unless_possible(asking(project="p"), Settings())
    there = Settings(trackio_url="file:///tmp/runs")
    monkeypatch.setattr(
        "ft_service.control.tracking.integration_check.find_spec", lambda name: None
    )
    with pytest.raises(SpecError, match=r"pip install 'ft-service\[trackio\]'"):
        refuse_unless_possible(asking(project="p"), there)
    monkeypatch.setattr(
        "ft_service.control.tracking.integration_check.find_spec", lambda name: object()
    )
    refuse_unless_possible(asking(project="p"), there)


@pytest.mark.parametrize("project", ["a/b", "registry-a", "a_system", ""])
def test_names_that_trackio_would_change_or_refuse_are_refused_here(project: str) -> None:
    with pytest.raises(ValidationError):
        asking(project=project)
