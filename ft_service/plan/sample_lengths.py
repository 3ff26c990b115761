"""Lengths of the samples before training: counted, or guessed from a file's size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ft_service.data.data_file import Counts
from ft_service.data.statistics import DataStatistics, items_of_steps
from ft_service.spec import JobSpec

BYTES_PER_TOKEN = 5
"""Bytes of a data file per token, JSON around the text included: a guess."""


PROMPT_TOKENS = 100
"""Tokens of a prompt to grade: a guess until they are counted."""


@dataclass(frozen=True)
class SampleLengths:
    """The samples of one epoch."""

    tokens: int
    samples: int | None = None
    """None: not counted."""
    longest: int | None = None
    """Tokens of the longest before it was cut; None: not counted, up to training.max_length."""
    with_images: bool = False
    """Whether any sample is known to have an image."""

    @property
    def mean(self) -> int | None:
        """Tokens of a sample, rounded up."""
        return -(-self.tokens // self.samples) if self.samples else None

    @classmethod
    def counted(cls, counts: Counts) -> SampleLengths:
        return cls(
            counts.tokens,
            counts.samples,
            counts.longest or None,
            with_images=counts.image_tokens > 0,
        )

    @classmethod
    def of_data(cls, counts: Counts, statistics: DataStatistics, spec: JobSpec) -> SampleLengths:
        """The lengths without the samples that validation_split sets aside; of a sample and of what
        its teacher reads, which is one of both, the mean.

        `counts`: counts of the whole training file.
        """
        samples = statistics.items * (2 if counts.pairs else 1)
        return cls(
            statistics.training.tokens,
            samples,
            counts.longest or None,
            with_images=counts.image_tokens > 0,
        )._of_student(spec)

    @classmethod
    def of_prompts(cls, counts: Counts, spec: JobSpec) -> SampleLengths:
        """The samples of reinforcement learning: the answers to each prompt, each with it and as
        long as it may be; with a context, of what student and teacher read the mean. `counts`:
        counts of the prompts.
        """
        return cls.counted(counts)._of_student(spec).with_answers(spec)

    def _of_student(self, spec: JobSpec) -> SampleLengths:
        """The student's samples, each as long as the mean of it and of what its teacher reads, if
        these are the samples of both.
        """
        if not spec.context or self.samples is None:
            return self
        return replace(self, tokens=-(-self.tokens // 2), samples=self.samples // 2)

    def with_answers(self, spec: JobSpec) -> SampleLengths:
        """The samples of reinforcement learning, if these are the lengths of its prompts, whose
        number is known.
        """
        assert self.samples is not None, "the prompts are counted"
        group = spec.samples_of_item
        answer = spec.longest_rollout
        if spec.environment is not None:
            longest = spec.training.max_length  # of a row; an agent adds to the prompt
        else:
            longest = None if self.longest is None else self.longest + answer
        return SampleLengths(
            group * (self.tokens + self.samples * answer), group * self.samples, longest
        )

    @classmethod
    def of_size(cls, size: int) -> SampleLengths:
        """A guess from the bytes of a file."""
        return cls(size // BYTES_PER_TOKEN)

    def of_training(self, spec: JobSpec) -> int:
        """Tokens of the whole training, over all epochs or steps."""
        training = spec.training
        if training.max_steps is None and spec.reinforcement is not None and self.samples is None:
            prompts = self.tokens // PROMPT_TOKENS
            return (
                training.epochs
                * prompts
                * spec.samples_of_item
                * (PROMPT_TOKENS + spec.longest_rollout)
            )
        if training.max_steps is None:
            return training.epochs * self.tokens
        if not self.samples:
            return training.max_steps * training.batch * spec.samples_of_item * training.max_length
        items = max(1, self.samples // spec.samples_of_item)
        samples = items_of_steps(training.max_steps, training.batch, items) * spec.samples_of_item
        return samples * (self.mean or training.max_length)
