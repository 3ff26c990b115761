"""The page docs/tinker-methods.md: every public method of the `tinker` package's clients, and what
this service does with it.

A test walks the methods with the package, unmodified: those of NOT_HERE are refused with a text
that says so, all others work.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib.metadata import version

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
_OTHERWISE = (
    "`ft download JOB`, `GET /v1/fine_tuning/jobs/JOB/adapter` and "
    "`save_weights_for_sampler` give the adapter as PEFT has it"
)
_COPY = "publish the weights and load them by their path"
_USAGE = (
    "`GET /v1/organization/usage` has tokens and slot-seconds by project; nothing is billed here"
)
NOT_HERE: Mapping[str, str] = {
    "ServiceClient.copy_weights": _COPY,
    "TrainingClient.save_weights_external": _OTHERWISE,
    "RestClient.assign_session_project": "a session is of the project of its key",
    "RestClient.copy_weights": _COPY,
    "RestClient.export_session_trace": "`ft logs` and the job's events tell what happened",
    "RestClient.get_audit_log": "`ft audit` shows the changes of a project",
    "RestClient.get_billing_usage": _USAGE,
    "RestClient.get_current_checkpoint_storage_usage": "`list_user_checkpoints` has the size of "
    "each",
    "RestClient.get_external_weights_urls": _OTHERWISE,
    "RestClient.search_sessions": "`list_sessions` and `ft jobs` list them",
    "RestClient.whoami": "a key has no person: `ft keys list`",
}
"""Method → what to do instead.

A method whose name ends in `_async` is the same as the one without.
"""

_LOCAL = {
    "ServiceClient.create_custom_loss": "computed by the client",
    "ServiceClient.create_rest_client": "in the client",
    "ServiceClient.get_console_url": "in the client: an address of Tinker's own console",
    "TrainingClient.get_console_url": "in the client: an address of Tinker's own console",
    "TrainingClient.forward_backward_custom": "the loss is computed by the client, its gradient "
    "here",
    "TrainingClient.get_tokenizer": "in the client: from the hub by the base's published name, or "
    "a folder of its name",
    "SamplingClient.get_tokenizer": "in the client: from the hub by the base's name, or from a "
    "folder of that name",
    "SamplingClient.create": "in the client",
    "SamplingClient.on_queue_state_change": "in the client",
    "TrainingClient.load_state": "and `load_state_with_optimizer`: into a model with the same "
    "adapter",
}
"""Method → a remark."""

_HEAD = """\
# Tinker's methods, one by one

<!-- made by docs.site.generated -->

Every public method of the `tinker` package {version}, and whether it works against this service with nothing changed but
`TINKER_BASE_URL` and `TINKER_API_KEY` ([how](tinker.md)). ✔: a test calls it with the unmodified package. Methods that end in
`_async` do the same as those without. What is not here is refused by its name.
"""


def methods(client: str) -> list[str]:
    """Names of a client's public methods, `_async` ones too."""
    import tinker

    found = inspect.getmembers(getattr(tinker, client), callable)
    return sorted(name for name, _ in found if not name.startswith("_"))


def page() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD.format(version=version("tinker")), *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    for client in CLIENTS:
        yield f"## {client}\n\n| method | | |\n| --- | --- | --- |"
        names = methods(client)
        for name in names:
            if name.endswith("_async") and name.removesuffix("_async") in names:
                continue
            full = f"{client}.{name}"
            instead = NOT_HERE.get(full)
            yield f"| `{name}` | {'not here' if instead else '✔'} | {instead or _LOCAL.get(full, '')} |"
        yield ""
