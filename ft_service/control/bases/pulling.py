"""What is asked before a base is fetched, by `ft pull` and by the server: the folder that it goes
to, its name there, and whether it can be tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ft_service.bases.catalogue import MAX_DEPTH, is_model_name
from ft_service.bases.describing import Descriptions
from ft_service.bases.description import Described
from ft_service.errors import FtError, SpecError, is_lost
from ft_service.installation import SAMPLE_MODELS
from ft_service.plan.vocabulary_check import refuse_ids_without_row
from ft_service.spec import is_tuned

NOT_HERE = "The weights of {name} are not here yet: they have to be fetched before a job can start."
NO_FOLDER = "FT_MODELS names the sample's folder only: add one for what is pulled."


def pull_folder(folders: Sequence[Path]) -> Path | None:
    """The folder of models that bases are fetched into: the first that is not the sample's; None:
    there is none.
    """
    own = (folder.absolute() for folder in folders if folder.absolute() != SAMPLE_MODELS)
    return next(own, None)


def folder_for(called: str, folders: Sequence[Path], field: str) -> Path:
    """`pull_folder`, for a base with this name. `field`: what the name was given as.

    Raises SpecError for a name that no job could give, and without a folder.
    """
    deep = called.count("/") >= MAX_DEPTH
    if (
        not is_model_name(called)
        or deep
        or is_tuned(called)
        or called != called.strip()
        or called.startswith("-")
    ):
        raise SpecError(
            f"{field} = {called[:80]!r}: must be a name as in ORG/NAME, of at most {MAX_DEPTH} "
            "parts, not empty and not "
            "hidden, that begins with neither '-' nor 'ft:', the beginning of tuned models' names.",
            param=field.lstrip("-"),
        )
    folder = pull_folder(folders)
    if folder is None:
        raise SpecError(NO_FOLDER, param="FT_MODELS")
    return folder


def described(folder: Path, descriptions: Descriptions) -> Described | None:
    """Describe a base, which takes seconds. None: nothing here describes bases, and the cache has
    no description.

    Raises NotDescribedError.
    """
    if descriptions.missing is not None:
        return descriptions.known(folder)
    return descriptions.describe(folder)


def refusal(staged: Path, describe: Callable[[Path], Described | None]) -> FtError | None:
    """Why a base cannot be tuned, by all of its files but the weights. None: it can, or those files
    do not say it.

    Raises UnavailableError if the host is at fault that it was not described.
    """
    try:
        if (document := describe(staged)) is not None:
            refuse_ids_without_row(document.description(), staged)
    except FtError as error:
        if is_lost(error):
            raise
        # config.json alone does not say enough: the weights will
        return None if error.code == "model_unreadable" else error
    return None
