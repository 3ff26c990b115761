"""Direct preference optimisation by tinker-cookbook (its own loss, computed in the client):
`cookbook_dpo.py BASE PAIRS LOGS`.

PAIRS: a file of preference pairs in OpenAI's format. Run by the Python that has the cookbook, in
the folder of bases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import chz  # pyright: ignore[reportMissingImports]  # where the cookbook is installed
import datasets  # pyright: ignore[reportMissingImports]
from tinker_cookbook.preference import train_dpo  # pyright: ignore[reportMissingImports]
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons  # pyright: ignore[reportMissingImports]
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder  # pyright: ignore[reportMissingImports]
from tinker_cookbook.preference.types import Comparison, LabeledComparison  # pyright: ignore[reportMissingImports]
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # pyright: ignore[reportMissingImports]


@chz.chz
class Pairs(ComparisonDatasetBuilder):
    """The pairs of a file."""

    path: str

    def get_train_and_test_datasets(self) -> tuple[Any, None]:
        lines = Path(self.path).read_text().splitlines()
        return datasets.Dataset.from_list([{"line": line} for line in lines]), None

    def example_to_labeled_comparison(self, example: dict[str, str]) -> Any:
        pair = json.loads(example["line"])
        answers = {
            "completion_A": pair["preferred_output"],
            "completion_B": pair["non_preferred_output"],
        }
        return LabeledComparison(
            comparison=Comparison(prompt_conversation=pair["input"]["messages"], **answers),
            label="A",
        )


def main() -> None:
    base, pairs, logs = sys.argv[1:]
    form = {
        "model_name_for_tokenizer": base,
        "renderer_name": "role_colon",
        "max_length": 256,
        "batch_size": 16,
    }
    data = DPODatasetBuilderFromComparisons(
        common_config=ChatDatasetBuilderCommonConfig(**form), comparison_builder=Pairs(path=pairs)
    )
    made = {
        "dataset_builder": data,
        "recipe_name": "dpo",
        "renderer_name": "role_colon",
        "lora_rank": 8,
        "learning_rate": 2e-3,
    }
    train_dpo.main(
        train_dpo.Config(
            log_path=logs, model_name=base, save_every=0, eval_every=0, max_steps=6, **made
        )
    )


if __name__ == "__main__":
    main()
