from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit
from ft_service.rundir.manifest import AdapterSource, Manifest, spec_beside
from ft_service.rundir.model_card import CARD, describe_adapter, model_card
from tests.support.run_directories import finished_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path)


@pytest.fixture
def manifest(run: RunDir) -> Manifest:
    found = run.read("adapter/manifest.json", Manifest)
    assert found is not None
    return found


def test_the_card_says_how_to_use_the_adapter_and_how_well_it_does(
    manifest: Manifest, run: RunDir
) -> None:
    text = run.path(f"adapter/{CARD}").read_text()
    assert CARD in manifest.files
    assert f"# {manifest.tuned_name}\n" in text
    assert f'AutoModelForCausalLM.from_pretrained("{manifest.base.name}"' in text
    assert "| validation loss | 1.5000 |" in text
    assert f"| `lora.r` | {manifest.spec.lora.r} |" in text
    assert "--max-lora-rank 8 " in text, "of 4, which vLLM takes no limit of"


def test_nothing_that_leaves_with_an_adapter_names_a_path_of_its_host(run: RunDir) -> None:
    ended = run.read("attempts/1/exit.json", Exit)
    assert ended is not None
    base = run.root.parent / "base"
    run.write(
        "attempts/1/exit.json",
        ended.model_copy(update={"message": f"{base}/config.json is broken; see https://a.org/b"}),
    )
    manifest = describe_adapter(
        run, run.path("adapter"), AdapterSource(attempt=3, step=6, versions={})
    )
    assert manifest.history[0].message == "…/config.json is broken; see https://a.org/b"
    for path in run.path("adapter").iterdir():
        assert str(run.root.parent).encode() not in path.read_bytes()
        assert b"/data/train.jsonl" not in path.read_bytes()
    assert spec_beside(run.path("adapter"), manifest).model.path == str(base)
    elsewhere = run.root.parent.parent / "adapter"
    assert spec_beside(elsewhere, manifest).model.path == ""


def test_a_hub_is_told_the_base_only_where_it_could_know_it(manifest: Manifest) -> None:
    def metadata(base: str) -> dict[str, object]:
        return yaml.safe_load(model_card(manifest, base).split("---")[1])

    assert metadata("Qwen/Qwen3-8B")["base_model"] == "Qwen/Qwen3-8B"
    assert "base_model" not in metadata("tiny-llama")
    assert metadata("tiny-llama")["library_name"] == "peft"
