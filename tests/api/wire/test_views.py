"""Views of records. Pure."""

from __future__ import annotations

from api.wire.views import CheckpointMetricsView, FileView, UploadView, checkpoint_view, list_view
from ft_service.rundir.events import Metrics
from ft_service.spec import TunedName
from ft_service.store.records import Checkpoint, File, Upload

FILE = File(
    id="file-1",
    project_id="p",
    filename="a.jsonl",
    purpose="fine-tune",
    bytes=3,
    sha256="x",
    created_at=9.9,
    expires_at=20.5,
)


def test_a_view_has_a_records_fields_whole_seconds_and_what_is_given() -> None:
    view = FileView.of(FILE)
    assert view.model_dump() == {
        "id": "file-1",
        "object": "file",
        "bytes": 3,
        "created_at": 9,
        "filename": "a.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
        "status_details": None,
        "expires_at": 20,
    }
    assert FileView.of(FILE, expires_at=None).expires_at is None
    upload = Upload(
        id="u",
        project_id="p",
        filename="a",
        purpose="fine-tune",
        bytes=1,
        file_seconds=None,
        file_id="file-1",
    )
    assert UploadView.of(upload, file=view).file == view


def test_a_page_names_its_first_and_last() -> None:
    page = list_view([FileView.of(FILE), FileView.of(FILE, id="file-2")], has_more=True)
    assert (page.first_id, page.last_id, page.has_more) == ("file-1", "file-2", True)
    assert (list_view([], has_more=False).first_id, list_view([], has_more=False).last_id) == (
        None,
        None,
    )


def test_a_checkpoint_names_its_model_and_repeats_the_validation_of_the_whole_file() -> None:
    metrics = Metrics(
        step=4, total_steps=8, train_loss=2.0, valid_loss=1.5, valid_mean_token_accuracy=0.5
    )
    point = Checkpoint(
        id="ftckpt_1",
        project_id="p",
        job_id="ftjob-1",
        name="step-4",
        step=5,
        attempt=1,
        created_at=1.7,
        metrics=metrics,
    )
    name = TunedName("tiny", "local", "v1", "1")
    view = checkpoint_view(point, name)
    assert (view.created_at, view.step_number, view.fine_tuned_model_checkpoint) == (
        1,
        5,
        str(name.at(5)),
    )
    assert view.metrics == CheckpointMetricsView(
        step=5,
        train_loss=2.0,
        train_mean_token_accuracy=None,
        valid_loss=1.5,
        valid_mean_token_accuracy=0.5,
        full_valid_loss=1.5,
        full_valid_mean_token_accuracy=0.5,
    )
