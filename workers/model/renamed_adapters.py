"""The names that an adapter's file needs so that PEFT finds every tensor again, by PEFT's and
transformers' own conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from peft import PeftConfig, PeftModel
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
)
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ft_service.bases.adapter_names import AdapterNames
from ft_service.bases.module_rules import NOTHING
from ft_service.errors import SpecError

_PREFIX = "base_model.model."
_LORA = ".lora_"
_NAMES = "_ft_names"
Rename = Callable[[str], str]


def names_of(config: PeftConfig) -> AdapterNames:
    """Names in the file of the adapter of a built model, by that model's config of it."""
    return vars(config).get(_NAMES, AdapterNames())


def settle_names(
    peft_model: PeftModel,
    config: PeftConfig,
    trained: Mapping[str, Tensor],
    tied: Mapping[str, str] = NOTHING,
) -> None:
    """Find the names for the file of an adapter, and keep them with its config.

    `trained`: its tensors, which may be on meta, by their names in the model; `tied`: as in
    `AdapterNames`. Raises SpecError for a base for which there are no such names.
    """
    base: Any = peft_model.get_base_model()

    def found(in_file: Mapping[str, Tensor]) -> set[str]:
        return set(
            convert_peft_adapter_state_dict_for_transformers(peft_model, config, dict(in_file))
        )

    lost = trained.keys() - found(trained)
    chosen: dict[str, str] = {}
    for rename in _backwards(base) if lost else ():
        tried = {name: _PREFIX + rename(name.removeprefix(_PREFIX)) for name in sorted(lost)}
        tried = {name: other for name, other in tried.items() if other != name}
        again = found({other: trained[name] for name, other in tried.items()}) if tried else set()
        chosen.update({name: tried[name] for name in tried.keys() & again})
        lost = lost - chosen.keys()
    names = AdapterNames(
        {name.partition(_LORA)[0]: other.partition(_LORA)[0] for name, other in chosen.items()}
    )
    if lost or (
        chosen
        and trained.keys()
        != found({names.in_file(name): tensor for name, tensor in trained.items()})
    ):
        raise _would_be_lost(base.config.model_type, sorted(lost or chosen))
    vars(config)[_NAMES] = replace(names, tied=tied)


def _backwards(base: PreTrainedModel) -> Iterator[Rename]:
    """Ways from names in a model to those in its base's files: each of transformers' renamings the
    other way round, and all.
    """
    rules = [
        rule for rule in get_model_conversion_mapping(base) if isinstance(rule, WeightRenaming)
    ]
    turned: list[Any] = [rule.reverse_transform() for rule in reversed(rules)]
    for rule in turned:
        yield lambda name, rule=rule: rule.rename_source_key(name)[0]
    yield lambda name: _by_all(turned, name)


def _by_all(rules: Iterable[Any], name: str) -> str:
    for rule in rules:
        name = rule.rename_source_key(name)[0]
    return name


def _would_be_lost(kind: str, lost: list[str]) -> SpecError:
    return SpecError(
        f"The base is a {kind} model, of whose adapters PEFT would rename {len(lost)} tensors as "
        "it loads them, and then miss "
        f"them ({lost[0].removeprefix(_PREFIX)}): training them would be in vain.",
        param="model",
    )
