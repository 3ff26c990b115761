"""What the card of an export says."""

from __future__ import annotations

from pathlib import Path

from ft_service.bases.origin import licence_of
from ft_service.rundir.documents import ExportFormat
from ft_service.rundir.evaluations import EvaluatedPrompt, Evaluation, evaluation_key
from ft_service.rundir.manifest import Manifest
from tests.support.run_directories import finished_run
from workers.exports.export_card import CURVE_ROWS, export_card, thinned


def test_a_card_says_how_to_load_what_it_cost_and_what_it_was_made_of(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    manifest = run.read("adapter/manifest.json", Manifest)
    assert manifest is not None
    run.put("metrics.csv", b"step,train_loss,valid_loss\n1,2.5,\n6,1.25,1.5\n")
    answer = EvaluatedPrompt(
        prompt="Where?",
        reference=None,
        base="Who knows",
        tuned="In\nHull",
        scores={},
        base_scores={},
    )
    run.write(
        evaluation_key(6, 3),
        Evaluation(step=6, time=0.0, metrics={}, base_metrics={}, samples=[answer]),
    )
    losses = {"adapter_on_base_as_trained": 1.5, "adapter_on_bf16_base": 1.25, "merged": 1.375}
    report = {"validation_loss": losses, "samples": 5}
    text = export_card(manifest, ExportFormat.GGUF, report, run.root, "Qwen/Qwen3-8B", "apache-2.0")
    assert text.startswith(
        "---\nbase_model: Qwen/Qwen3-8B\nlicense: apache-2.0\nlibrary_name: gguf\n"
    )
    assert "ollama create NAME -f Modelfile" in text
    assert "| this model | 1.3750 |" in text
    assert "| 6 | 1.2500 | 1.5000 |" in text
    assert "Prompt: `Where?`\n\nBefore: `Who knows`\n\nAfter: `In Hull`" in text
    assert f"`{manifest.data[0].sha256}`" in text
    assert "| `lora.r` | 4 |" in text


def test_every_form_has_a_card(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    manifest = run.read("adapter/manifest.json", Manifest)
    assert manifest is not None
    for to in ExportFormat:
        text = export_card(manifest, to, {"r": 7}, run.root, "tiny", None)
        assert "## Use" in text
        assert "not stated in its files" in text
        assert "license:" not in text


def test_a_licence_is_read_from_the_card_of_the_base(tmp_path: Path) -> None:
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text("---\ntags:\n- x\nlicense: mit\n---\nlicense: other\n")
    assert licence_of(tmp_path) == "mit"


def test_long_curves_keep_their_ends() -> None:
    rows = thinned(range(1000))
    assert (len(rows), rows[0], rows[-1]) == (CURVE_ROWS, 0, 999)
