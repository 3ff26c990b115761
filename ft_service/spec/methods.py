"""OpenAI's `method` of a job: what its loss is, with the hyperparameters that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ft_service.spec.values import Number, Strict

AUTO = "auto"

DpoLoss = Literal["sigmoid", "ipo", "sigmoid_norm"]
Beta = Annotated[Number, Field(gt=0, le=100)]
Weight = Annotated[Number, Field(gt=0, le=100)]

BETAS: Mapping[DpoLoss, float] = {"sigmoid": 0.1, "ipo": 0.1, "sigmoid_norm": 5.0}
"""What beta "auto" stands for: 0.1 as in the papers of DPO and IPO, 5 where log-probabilities are means over tokens, as Tülu 3
was trained."""


class Hyperparameters(Strict):
    """OpenAI's three. "auto" leaves the choice to the service: epochs and batch by the number of samples, a learning rate that
    suits the base (ft_service/spec/rates.py). Where nothing is said it is the usual: 3 (of dpo 1), 8 and LEARNING_RATE; of dpo
    the rate always."""

    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = AUTO
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = AUTO
    learning_rate_multiplier: Annotated[Number, Field(gt=0, le=5000)] | Literal["auto"] = AUTO
    """Times LEARNING_RATE (of dpo: DPO_LEARNING_RATE) gives training.learning_rate."""


class SupervisedMethod(Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class DpoHyperparameters(Hyperparameters):
    """OpenAI's four, and beside them what TRL's DPOConfig calls by the same names. batch_size counts pairs."""

    beta: Beta | Literal["auto"] = AUTO
    """How dearly the answers may leave those of the model that training starts from: larger, and they stay nearer. "auto": 0.1,
    with sigmoid_norm 5."""
    loss_type: DpoLoss = "sigmoid"
    """sigmoid: the paper's; ipo: a squared distance from 1 / (2 beta), which does not go on for ever on pairs that are told
    apart already; sigmoid_norm: as sigmoid. With ipo and sigmoid_norm log-probabilities are means over an answer's tokens, so
    that longer answers do not count more."""
    rpo_alpha: Weight | None = None
    """Weight of a further term, the cross entropy of the preferred answers as in supervised training (TRL's loss_type "sft"):
    it keeps their probability from falling together with that of the others. None: there is none."""


class DpoMethod(Strict):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Method(Strict):
    """The loss. supervised: cross entropy of the assistant's words. dpo: direct preference optimisation on pairs of answers."""

    type: Literal["supervised", "dpo"] = "supervised"
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
        """Those of the type."""
        return (self.dpo if self.type == "dpo" else self.supervised).hyperparameters

    def dpo_options(self) -> DpoOptions | None:
        """The resolved options of direct preference optimisation. None: the job is supervised."""
        if self.type != "dpo":
            return None
        given = self.dpo.hyperparameters
        beta = BETAS[given.loss_type] if given.beta == AUTO else given.beta
        return DpoOptions(beta=beta, loss_type=given.loss_type, rpo_alpha=given.rpo_alpha)


class DpoOptions(Strict):
    """`DpoHyperparameters` as a worker reads them."""

    beta: Beta
    loss_type: DpoLoss
    rpo_alpha: Weight | None = None
