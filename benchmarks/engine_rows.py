"""The requests that the engine is measured on, by the shape of their prompts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`jobs` jobs, each with its own state of `state` tokens and `questions` questions of `question` tokens."""

    name: str
    state: int
    questions: int
    question: int
    jobs: int = 1
    cached: bool = False

    @property
    def question_tokens(self) -> int:
        """Question rows of the pass."""
        return self.jobs * self.questions * self.question

    @property
    def tokens(self) -> int:
        """Rows of the pass: a cached state has none."""
        return self.question_tokens + (0 if self.cached else self.jobs * self.state)

    @property
    def states(self) -> list[int]:
        """Lengths of the states that the pass reads."""
        return [] if self.cached else [self.state] * self.jobs

    @property
    def question_lengths(self) -> list[int]:
        """Lengths of the pass's questions."""
        return [self.question] * (self.jobs * self.questions)


ROWS = (
    Row("150-token state, 1 question of 100", 150, 1, 100),
    Row("150-token state, 4 questions of 100", 150, 4, 100),
    Row("150-token state, 16 questions of 80", 150, 16, 80),
    Row("150-token state, 64 questions of 80", 150, 64, 80),
    Row("64 jobs of 150-token states, 4 questions of 100", 150, 4, 100, jobs=64),
    Row("24K state, 4 questions of 100", 24_576, 4, 100),
    Row("24K state cached, 4 questions of 100", 24_576, 4, 100, cached=True),
    Row("64K state, 2 questions of 100", 65_536, 2, 100),
    Row("117K state, 2 questions of 100", 117_000, 2, 100),
)
