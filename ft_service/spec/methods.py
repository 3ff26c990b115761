"""OpenAI's `method` of a job: its loss, with the hyperparameters of that loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ft_service.spec.option_types import Number, Strict

AUTO = "auto"

DpoLoss = Literal["sigmoid", "ipo", "sigmoid_norm"]
Beta = Annotated[Number, Field(gt=0, le=100)]
Weight = Annotated[Number, Field(gt=0, le=100)]

BETAS: Mapping[DpoLoss, float] = {"sigmoid": 0.1, "ipo": 0.1, "sigmoid_norm": 5.0}
"""Loss → beta "auto": 0.1 as in the papers of DPO and IPO, 5 where log-probabilities are means over tokens, as for Tülu 3."""


class Hyperparameters(Strict):
    """OpenAI's three. With "auto" the service chooses: epochs and batch by the number of samples, the learning rate by the base
    (ft_service/spec/auto_hyperparameters.py). Defaults: 3 epochs (dpo: 1), a batch of 8 and LEARNING_RATE. dpo has no "auto"
    learning rate."""

    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = AUTO
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = AUTO
    learning_rate_multiplier: Annotated[Number, Field(gt=0, le=5000)] | Literal["auto"] = AUTO
    """training.learning_rate as a multiple of LEARNING_RATE (dpo: DPO_LEARNING_RATE)."""


class SupervisedMethod(Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class DpoHyperparameters(Hyperparameters):
    """OpenAI's four, and two with the names of TRL's DPOConfig. batch_size counts pairs."""

    beta: Beta | Literal["auto"] = AUTO
    """Strength of the penalty for leaving the model that training starts from: the larger, the closer the answers stay. "auto":
    0.1, with sigmoid_norm 5."""
    loss_type: DpoLoss = "sigmoid"
    """sigmoid: that of the paper; ipo: a squared distance from 1 / (2 beta), which stops pushing pairs that are already
    separated; sigmoid_norm: as sigmoid. With ipo and sigmoid_norm log-probabilities are means over an answer's tokens, so that
    longer answers do not count more."""
    rpo_alpha: Weight | None = None
    """Weight of an additional term, the cross entropy of the preferred answers as in supervised training (TRL's loss_type
    "sft"): it prevents their probability from falling with that of the others. None: off."""


class DpoMethod(Strict):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Method(Strict):
    """The loss. supervised: cross entropy of the assistant's tokens. dpo: direct preference optimisation on pairs of
    answers. tinker: a job without data files, whose client runs the training loop; Tinker's wire alone creates it."""

    type: Literal["supervised", "dpo", "tinker"] = "supervised"
    supervised: SupervisedMethod = SupervisedMethod()
    dpo: DpoMethod = DpoMethod()

    @model_validator(mode="after")
    def _own_section_only(self) -> Method:
        for other in {"supervised", "dpo"} - {self.type}:
            if other in self.model_fields_set:
                raise ValueError(f"method.{other} is given and method.type is {self.type!r}: give method.{self.type} instead")
        return self

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters of the type."""
        return (self.dpo if self.type == "dpo" else self.supervised).hyperparameters

    def dpo_options(self) -> DpoOptions | None:
        """The resolved options of direct preference optimisation. None: the job is supervised."""
        if self.type != "dpo":
            return None
        given = self.dpo.hyperparameters
        beta = BETAS[given.loss_type] if given.beta == AUTO else given.beta
        return DpoOptions(beta=beta, loss_type=given.loss_type, rpo_alpha=given.rpo_alpha)


class DpoOptions(Strict):
    """`DpoHyperparameters` resolved for a worker."""

    beta: Beta
    loss_type: DpoLoss
    rpo_alpha: Weight | None = None
