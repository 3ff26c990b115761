"""An adapter under the names of the base's files, as PEFT wants it of some bases, in all that reads
adapters.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.verify import shape_faults
from ft_service.spec import AdapterRef
from tests.support.training.causal_types import save_type
from tests.support.training.checks import REREAD_BY_PEFT, logits_of, published_model
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU, set_adapters
from workers.base.load import adapters, load
from workers.job.parent_adapter import adopt
from workers.job.reread_adapter import WEIGHTS
from workers.model.build import build
from workers.model.peft_adapter import PeftAdapter
from workers.output.outcome import new_folder, write_adapter
from workers.tasks.fidelity import with_adapter
from workers.tasks.merge import merge
from workers.tasks.pad_ranks import pad_ranks

LORA = {"r": 2, "target_modules": "all-linear", "rank_pattern": {"shared_experts.up_proj": 3}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_reads_adapters_finds_those_that_are_called_as_in_the_files(
    tmp_path: Path, monkeypatch: Any
) -> None:
    base = tmp_path / "base"
    folder = tmp_path / "adapter"
    assert save_type("laguna", base)
    spec = spec_for(base, precision={"default": "bf16", "compute": "fp32"}, lora=LORA)

    def built() -> PeftModel:
        model = build(spec, CPU).peft_model
        load(model, base, seed=1, compute_dtype=torch.float32, device=CPU)
        return model

    model = built()
    set_adapters(model)
    tensors = {
        name.replace(".default.", "."): p.detach().contiguous() for name, p in adapters(model)
    }
    with REREAD_BY_PEFT, new_folder(folder) as made:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_adapter(made, shapes, tensors.items(), model.peft_config["default"], spec)
    ours = logits_of(model.eval())
    held = load_file(folder / WEIGHTS)
    assert any(".mlp.shared_expert." in name for name in held)
    assert not any(".mlp.shared_experts." in name for name in held)
    assert set(PeftAdapter(folder).weights()) <= {
        name for name, _ in published_model(base).named_parameters()
    }
    assert shape_faults(folder, None) == []

    parent = AdapterRef(name="ft:parent", path=str(folder), job_id="ftjob-1")
    manifest = SimpleNamespace(files={WEIGHTS: FileDigest.of(folder / WEIGHTS)})
    monkeypatch.setattr(RunDir, "read", lambda *_: manifest)
    going_on = built()
    adopt(dict(adapters(going_on)), parent)
    assert torch.equal(logits_of(going_on.eval()), ours)
    assert torch.equal(logits_of(with_adapter(spec, folder, CPU).eval()), ours)

    (tmp_path / "padded").mkdir()
    pad_ranks(folder, tmp_path / "padded")
    padded = PeftModel.from_pretrained(published_model(base), tmp_path / "padded").eval()
    assert (logits_of(padded) - ours).abs().max() < 1e-4
    merge(base, folder, tmp_path / "merged", to="bf16")
    before = logits_of(published_model(base).eval())
    merged = logits_of(published_model(tmp_path / "merged").eval())
    assert (merged - ours).norm() < 0.1 * (ours - before).norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_on_layers_that_are_stored_turned_is_merged_into_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    folder = tmp_path / "adapter"
    assert save_type("gpt2", base)
    spec = spec_for(
        base,
        precision={"default": "bf16", "compute": "fp32"},
        lora={"r": 2, "target_modules": "all-linear"},
    )
    model = build(spec, CPU).peft_model
    load(model, base, seed=1, compute_dtype=torch.float32, device=CPU)
    set_adapters(model)
    tensors = {
        name.replace(".default.", "."): p.detach().contiguous() for name, p in adapters(model)
    }
    with REREAD_BY_PEFT, new_folder(folder) as made:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_adapter(made, shapes, tensors.items(), model.peft_config["default"], spec)
    ours = logits_of(model.eval())
    before = logits_of(published_model(base).eval())
    merge(base, folder, tmp_path / "merged", to="bf16")
    merged = logits_of(published_model(tmp_path / "merged").eval())
    assert (merged - ours).norm() < 0.1 * (ours - before).norm()
    with pytest.raises(SpecError, match="the other way round"):
        merge(base, folder, tmp_path / "int4", to="int4")
