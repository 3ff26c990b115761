"""The loop that has requests for samples of Tinker clients answered, which wait in the database: by the preview's process, or
by the operator's inference servers.

A server that is killed loses none: what is not answered then is asked again by the next one. An answer that is stored stays.
Where weights are sampled from for the first time, the process also computes the log-probabilities of the sequences that the
trainer has left beside them: how far the two are apart is a metric, and a warning of the model's job if it is far.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.control.tinker_models import find_weights
from ft_service.errors import FtError, NotFoundError, SpecError, UnavailableError
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.rundir.evaluations import Probe
from ft_service.serving.preview import PreviewModel
from ft_service.serving.served_verdict import OTHER_PRECISION, judge
from ft_service.serving.token_sampler import SampleOrders, Sampler
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent, Principal
from ft_service.store.sql import Store
from ft_service.store.tinker import TinkerSample, TinkerSampler
from ft_service.tinker.names import WeightsPath
from ft_service.tinker.sample_calls import ModelInput, Sampled, SampleRequest, SamplingParams, TextChunk, parse_sample_request
from ft_service.tinker.saved_weights import PROBES, SamplerProbes, sampler_key

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
BUSY_SECONDS = 1.0
"""Pause before a request is sent again that the sampler had no place for."""
AT_ONCE = 128
AT_ONCE_OF_PROJECT = 48


def run(
    settings: Settings, store: Store, meters: Meters, stop: threading.Event, *, sampler: Sampler, descriptions: Descriptions
) -> None:
    """Have requests answered until `stop` is set."""
    SampleLoop(store, sampler, Places.of(settings), Catalogue.from_settings(settings, descriptions), meters).run(stop)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request that is under way."""

    sample: TinkerSample | None
    """None: it measures how far the sampler is from the trainer."""
    sampler: TinkerSampler
    job: Job | None
    probe: Probe | None = None


@dataclass
class SampleLoop:
    """Requests for samples, answered one after the other as the sampler has places. For one thread."""

    store: Store
    sampler: Sampler
    places: Places
    catalogue: Catalogue
    meters: Meters

    def __post_init__(self) -> None:
        self._orders = SampleOrders[_Asked](self.sampler)
        self._measured: dict[str, list[tuple[Probe, list[float]]]] = {}
        """Sampler's id → its probes so far, with its log-probabilities of them."""
        self._known: set[str] = set()
        """Samplers that were measured, or have nothing to measure."""

    def run(self, stop: threading.Event) -> None:
        """Answer requests until `stop` is set. An error of one request is its answer."""
        pause = 0.0
        while not stop.is_set():
            wait, pause = pause, BUSY_SECONDS
            try:
                self._take(wait)
                self._ask_waiting()
                pause = LOOK_SECONDS
            except UnavailableError as error:
                log.info("requests for samples wait: %s", error.message)
            except Exception:
                log.exception("requests for samples wait")

    def _ask_waiting(self) -> None:
        room = AT_ONCE - len(self._orders.under_way)
        if room <= 0:
            return
        of_project = Counter(asked.sampler.project_id for asked in self._orders.under_way)
        asked = {asked.sample.id for asked in self._orders.under_way if asked.sample is not None}
        for sample in self.store.tinker.unanswered(asked, room):
            if of_project[sample.project_id] >= AT_ONCE_OF_PROJECT:
                continue
            of_project[sample.project_id] += 1
            try:
                self._ask(sample)
            except UnavailableError:
                raise
            except FtError as error:
                category = "user" if isinstance(error, NotFoundError) else "server"
                self.store.tinker.answer_samples({sample.id: {"error": error.message, "category": category}})

    def _ask(self, sample: TinkerSample) -> None:
        sampler = self.store.tinker.get_sampler(sample.project_id, sample.sampler_id)
        request = parse_sample_request(sample.request)
        model, adapter, job = self._model(sampler)
        if job is not None and sampler.logprob_gap is None and sampler.id not in self._known:
            self._known.add(sampler.id)
            self._measure(sampler, model, str(adapter), job)
        self._orders.submit(_Asked(sample, sampler, job), model, adapter, request, sampler.project_id)

    def _model(self, sampler: TinkerSampler) -> tuple[PreviewModel, str | None, Job | None]:
        """The base with its formats, the folder of the adapter, and the job that trained it. Raises NotFoundError."""
        if sampler.model_path is None:
            return PreviewModel(str(self.catalogue.find(sampler.base).path), name=sampler.base), None, None
        path = WeightsPath.parse(sampler.model_path)
        owner = self.store.projects.get_project(sampler.project_id)
        caller = Principal(key_id="", project_id=owner.id, organization=owner.organization, scope="read")
        job, _ = find_weights(path, caller, self.store, self.places)
        folder = self.places.run(job.id).path(sampler_key(path.name))
        spec = job.spec
        return PreviewModel(spec.model.path, spec.precision.model_dump(mode="json")), str(folder), job

    def _measure(self, sampler: TinkerSampler, model: PreviewModel, adapter: str, job: Job) -> None:
        """Ask for the log-probabilities of the sequences that the trainer has left beside the weights."""
        assert sampler.model_path is not None
        key = f"{sampler_key(WeightsPath.parse(sampler.model_path).name)}/{PROBES}"
        document = self.places.run(job.id).readable(key, SamplerProbes)
        for probe in document.probes if document else ():
            chunk = TextChunk(tokens=probe.tokens)
            params = SamplingParams(max_tokens=1, temperature=0.0)
            request = SampleRequest(prompt=ModelInput(chunks=[chunk]), sampling_params=params, prompt_logprobs=True)
            self._orders.submit(_Asked(None, sampler, job, probe), model, adapter, request, sampler.project_id)

    def _take(self, seconds: float) -> None:
        """Take the parts of answers that have come, waiting for the first, and store the answers that are whole."""
        answers: dict[str, bytes | dict[str, Any]] = {}
        for asked, outcome in self._orders.ended(seconds):
            if isinstance(outcome, Sampled):
                if asked.sample is None:
                    self._compare(asked, outcome)
                else:
                    answers[asked.sample.id] = outcome.message()
            elif asked.sample is not None and not isinstance(outcome, UnavailableError):  # that is asked again
                category = "user" if isinstance(outcome, SpecError) else "server"
                answers[asked.sample.id] = {"error": outcome.message, "category": category}
        if answers:
            self.store.tinker.answer_samples(answers)

    def _compare(self, asked: _Asked, sampled: Sampled) -> None:
        """Compare the log-probabilities of one sequence with the trainer's; of all of them, store the mean distance."""
        assert asked.probe is not None
        assert asked.job is not None
        sampler_id, own = asked.sampler.id, [sampled.prompt[place][0] for place in sorted(sampled.prompt)]
        measured = self._measured.setdefault(sampler_id, [])
        measured.append((asked.probe, own))
        if any(other.sampler.id == sampler_id and other.sample is None for other in self._orders.under_way):
            return
        probes, served = zip(*self._measured.pop(sampler_id), strict=True)
        pairs = [pair for probe, own in zip(probes, served, strict=True) for pair in zip(probe.tuned, own, strict=True)]
        gap = fmean(abs(trainer - sampler) for trainer, sampler in pairs)
        self.store.tinker.note_gap(sampler_id, gap)
        self.meters.sampler_gap.observe(gap)
        verdict = judge(probes, served)
        if verdict.verified is False or gap > OTHER_PRECISION:
            text = f"Samples of {asked.sampler.model_path}: {verdict.text}. Losses that go by a ratio mean something else then."
            self.store.jobs.add_events(asked.job, [NewEvent(level="warn", message=text)])
