"""Options of a job's method, as the API shows it, and the measure of its losses. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ft_service.spec import PREFERENCE_METHODS

_OF_TRAINING = ("n_epochs", "batch_size", "learning_rate_multiplier")
"""A method's options that `training` shows too."""
_SHOWN_CONTEXT = 24
"""Characters of a teacher's context that its measure shows."""


def method_options(method: Mapping[str, Any]) -> dict[str, Any]:
    """The method by dotted name with the options that it alone has; of a grader, its name and type.

    Empty: supervised.
    """
    kind = method.get("type") or "supervised"
    if kind == "supervised":
        return {}
    own = method.get(kind) or {}
    given = own.get("hyperparameters") or {}
    hyperparameters = {
        name: value
        for name, value in given.items()
        if name not in _OF_TRAINING and value is not None
    }
    grader = own.get("grader")
    environment = own.get("environment") or {}
    return {
        "method.type": kind,
        **{
            f"method.{kind}.{name}": own[name]
            for name in ("teacher", "teacher_at", "with_context", "answers", "top_k")
            if own.get(name) not in (None, "data", "ranks")
        },
        **(
            {f"method.{kind}.grader": f"{grader.get('name')} ({grader.get('type')})"}
            if grader
            else {}
        ),
        **{
            f"method.{kind}.environment.{name}": value
            for name, value in environment.items()
            if name != "webhook_endpoint_id"
        },
        **{
            f"method.{kind}.hyperparameters.{name}": value
            for name, value in hyperparameters.items()
        },
    }


def _teacher_of(own: Mapping[str, Any]) -> str:
    """Who teaches, and behind which context: losses from two teachers measure different things."""
    name = own.get("teacher") or "the base"
    context = own.get("with_context")
    if not context:
        return name
    begin = " ".join(context[:_SHOWN_CONTEXT].split())
    more = "…" if len(context) > _SHOWN_CONTEXT else ""
    return f"{name} behind '{begin}{more}' ({hashlib.sha256(context.encode()).hexdigest()[:8]})"


def loss_measure(method: Mapping[str, Any]) -> str | None:
    """`cross entropy`, or `sigmoid of pairs (beta 0.1)`: losses of two jobs can be compared where
    it is the same. None: the job has rewards in place of losses.
    """
    kind = method.get("type") or "supervised"
    if kind == "reinforcement":
        return None
    if kind == "supervised":
        return "cross entropy"
    if kind == "distillation":
        own = method.get(kind) or {}
        given = own.get("hyperparameters") or {}
        loss = given.get("loss_type") or "forward_kl"
        whose = " on the student's answers" if own.get("answers") == "student" else ""
        words = f", {own['top_k']} words" if own.get("top_k") else ""
        weight = f" (beta {given['beta']:g})" if loss == "jsd" and given.get("beta") else ""
        return f"{loss} from {_teacher_of(own)}{weight}{words}{whose}"
    if kind not in PREFERENCE_METHODS:
        return f"the loss of {kind}"
    given = (method.get(kind) or {}).get("hyperparameters") or {}
    names = ["beta", "gamma", "rpo_alpha", "desirable_weight", "undesirable_weight"]
    if given.get("label_smoothing"):
        names.append("label_smoothing")
    options = ", ".join(f"{name} {given[name]:g}" for name in names if given.get(name) is not None)
    loss = given.get("loss_type") or ("sigmoid" if kind == "dpo" else kind)
    what = "labelled answers" if kind == "kto" else "pairs"
    return f"{loss} of {what}{f' ({options})' if options else ''}"
