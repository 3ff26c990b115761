"""The loop that has requests for samples of Tinker clients answered, which wait in the database: by
the preview's process, or by the operator's inference servers.

A server that is killed loses none: what is not answered then is asked again by the next one. An
answer that is stored stays. What the sampler does not take any more, since it has ended its process
twice, is answered with that.
Before weights are sampled from for the first time, the sampler's log-probabilities of the sequences
that the trainer has left beside them are asked for: how far the two are apart is a metric, and a
warning of the model's job if it is far.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.bases.description import ImageFacts, why_no_images
from ft_service.control.tinker.tinker_models import find_weights
from ft_service.errors import FtError, NotFoundError, SpecError, UnavailableError
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.serving.preview import PreviewModel
from ft_service.serving.preview_process import ProjectFullError
from ft_service.serving.served_verdict import OTHER_PRECISION, distance, judge
from ft_service.serving.token_sampler import SampleOrders, Sampler, SamplingStopped, TokenSampler
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent, Principal
from ft_service.store.sql import Store
from ft_service.store.tinker import TinkerSample, TinkerSampler
from ft_service.tinker.names import WeightsPath
from ft_service.tinker.sample_calls import Sampled, parse_sample_request
from ft_service.tinker.saved_weights import sampler_key

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
BUSY_SECONDS = 1.0
"""Pause before requests are sent again that the sampler had no place for: all, or those of one
project.
"""
AT_ONCE = 128
AT_ONCE_OF_PROJECT = 48
MEASURED_AT_ONCE = 8
"""Weights that are compared with the trainer's at once."""
MEASURED_OF_PROJECT = 2
"""Of one project, whose other requests wait meanwhile: a comparison waits while the sampler has no
place for the project, and those of others go on.
"""


def run(
    settings: Settings,
    store: Store,
    meters: Meters,
    stop: threading.Event,
    *,
    sampler: Sampler,
    descriptions: Descriptions,
) -> None:
    """Have requests answered until `stop` is set."""
    SampleLoop(
        store, sampler, Places.of(settings), Catalogue.from_settings(settings, descriptions), meters
    ).run(stop)


@dataclass
class SampleLoop:
    """Requests for samples, answered one after the other as the sampler has places.

    For one thread.
    """

    store: Store
    sampler: Sampler
    places: Places
    catalogue: Catalogue
    meters: Meters

    def __post_init__(self) -> None:
        self._orders = SampleOrders[tuple[str, str]](self.sampler)
        """By the ids of request and project."""
        self._full: dict[str, float] = {}
        """Projects that have no place at the sampler, which chats and other jobs of theirs take too
        → time (monotonic, seconds) until which nothing of theirs is sent.
        """
        self._known: set[str] = set()
        """Samplers that were measured, or are, or have nothing to measure."""
        self._measuring: dict[str, str] = {}
        """Those that are measured now, with their projects; their requests wait."""
        self._pool = ThreadPoolExecutor(MEASURED_AT_ONCE, thread_name_prefix="probes")
        self._ends = False

    def run(self, stop: threading.Event) -> None:
        """Answer requests until `stop` is set. An error of one request is its answer."""
        pause = 0.0
        while not stop.is_set():
            wait = pause
            pause = BUSY_SECONDS
            try:
                self._take(wait)
                self._ask_waiting()
                pause = LOOK_SECONDS
            except UnavailableError as error:
                log.info("requests for samples wait: %s", error.message)
            except Exception:
                log.exception("requests for samples wait")
        self._ends = True
        self._pool.shutdown(cancel_futures=True)

    def _ask_waiting(self) -> None:
        asked = [sample_id for sample_id, _ in self._orders.under_way]
        room = AT_ONCE - len(asked)
        if room <= 0:
            return
        of_project = Counter(project_id for _, project_id in self._orders.under_way)
        now = time.monotonic()
        self._full = {project_id: until for project_id, until in self._full.items() if until > now}
        measuring = self._measuring.copy()  # which other threads change
        measured = Counter(measuring.values())

        def is_full(own: str) -> bool:
            return (
                own in self._full
                or of_project[own] >= AT_ONCE_OF_PROJECT
                or measured[own] >= MEASURED_OF_PROJECT
            )

        full = set(filter(is_full, {*self._full, *of_project, *measured}))
        for sample in self.store.tinker.unanswered(
            room, asked, projects=full, samplers=tuple(measuring)
        ):
            project_id = sample.project_id
            if is_full(project_id) or sample.sampler_id in self._measuring:
                continue
            of_project[project_id] += 1
            try:
                measured[project_id] += self._ask(sample)
            except ProjectFullError as error:
                log.info(
                    "requests for samples of the project %s wait: %s", project_id, error.message
                )
                self._full[project_id] = now + BUSY_SECONDS
            except UnavailableError:
                raise
            except FtError as error:
                self.store.tinker.answer_samples({sample.id: _refusal(error)})

    def _ask(self, sample: TinkerSample) -> bool:
        """Ask for a sample, or first for the probes of its weights.

        Returns whether it is the probes.
        """
        sampler = self.store.tinker.get_sampler(sample.project_id, sample.sampler_id)
        request = parse_sample_request(sample.request)
        model, adapter, job = self._model(sampler)
        if job is not None and sampler.logprob_gap is None and sampler.id not in self._known:
            self._known.add(sampler.id)
            self._measuring[sampler.id] = sampler.project_id
            self._pool.submit(self._measure, sampler, model, str(adapter), job)
            return True
        self._orders.submit(
            (sample.id, sample.project_id),
            model,
            adapter,
            request,
            sampler.project_id,
            images=self._facts(model.path) if request.pictures else None,
        )
        return False

    def _facts(self, folder: str) -> ImageFacts:
        """What is known of the towers of a base.

        Raises SpecError for one that sees no images here, or is being described.
        """
        try:
            base = self.catalogue.descriptions.description(Path(folder))
        except UnavailableError as error:  # which other requests do not wait for
            raise SpecError(f"prompt: {error.message} Ask again then.", param="prompt") from None
        if base.images is None:
            raise SpecError(
                f"prompt: the base sees no images here: {why_no_images(base)}. Leave them out.",
                param="prompt",
            )
        return base.images

    def _model(self, sampler: TinkerSampler) -> tuple[PreviewModel, str | None, Job | None]:
        """The base with its formats, the folder of the adapter, and the job that trained it.

        Raises NotFoundError.
        """
        if sampler.model_path is None:
            return (
                PreviewModel(str(self.catalogue.find(sampler.base).path), name=sampler.base),
                None,
                None,
            )
        path = WeightsPath.parse(sampler.model_path)
        owner = self.store.projects.get_project(sampler.project_id)
        caller = Principal(
            key_id="", project_id=owner.id, organization=owner.organization, scope="read"
        )
        job, _ = find_weights(path, caller, self.store, self.places)
        folder = self.places.run(job.id).path(sampler_key(path.name))
        spec = job.spec
        return (
            PreviewModel(spec.model.path, spec.precision.model_dump(mode="json")),
            str(folder),
            job,
        )

    def _measure(self, sampler: TinkerSampler, model: PreviewModel, adapter: str, job: Job) -> None:
        """Compare the sampler's log-probabilities with those that the trainer has left beside its
        weights, and store the mean distance.
        """
        try:
            alone = TokenSampler(
                self.sampler, sampler.project_id, model, lambda: self._ends, _wait_for_place
            )
            probes, served = alone.score_probes(adapter)
            if not probes:
                return
            gap = distance([probe.tuned for probe in probes], served)
            self.store.tinker.note_gap(sampler.id, gap)
            self.meters.sampler_gap.observe(gap)
            verdict = judge(probes, served)
            if verdict.verified is False or gap > OTHER_PRECISION:
                text = (
                    f"Samples of {sampler.model_path}: {verdict.text}. Losses that go by a "
                    "ratio mean something else then."
                )
                self.store.jobs.add_events(job, [NewEvent(level="warn", message=text)])
        except SamplingStopped:
            pass
        except FtError as error:
            log.info(
                "weights are not compared with the trainer's: %s",
                error.message,
                extra={"job_id": job.id},
            )
        except Exception:
            log.exception("weights are not compared with the trainer's", extra={"job_id": job.id})
        finally:
            self._measuring.pop(sampler.id, None)

    def _take(self, seconds: float) -> None:
        """Take the parts of answers that have come, waiting for the first, and store the answers
        that are whole.
        """
        answers: dict[str, bytes | dict[str, Any]] = {}
        for (sample_id, _), outcome in self._orders.ended(seconds):
            if isinstance(outcome, Sampled):
                answers[sample_id] = outcome.message()
            elif not isinstance(outcome, UnavailableError):  # that is asked again
                answers[sample_id] = _refusal(outcome)
        if answers:
            self.store.tinker.answer_samples(answers)


def _refusal(error: FtError) -> dict[str, Any]:
    """The answer to a request that cannot be answered."""
    return {
        "error": error.message,
        "category": "user" if isinstance(error, (SpecError, NotFoundError)) else "server",
    }


def _wait_for_place(error: FtError, seconds: float) -> None:
    """Raise an error that is no lack of a place: requests for samples get it as their answer."""
    if not isinstance(error, UnavailableError):
        raise error
