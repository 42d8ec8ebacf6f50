"""What a packing job of chats is asked to do, and what it counts."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.data.chat.conversation import ChatFormat
from meshwright.data.chat.targets import ChatEncoder, Trained
from meshwright.data.chat.template import ChatTemplate, open_template
from meshwright.data.tokenize import HuggingFaceTokenizer
from meshwright.errors import DataError

Longer = Literal["refuse", "drop", "truncate"]


@dataclass(frozen=True)
class ChatJob:
    """Everything that decides the content of the dataset, besides the input."""

    tokenizer: str
    """tokenizer.json."""
    eos: str | None
    date: datetime.date
    chat_format: ChatFormat | None = None
    """None: each record's own."""
    trained: Trained = "assistant"
    template: str | None = None
    """A file with another template than the tokenizer's."""
    variables: dict[str, Any] = field(default_factory=dict)
    texts_are_turns: bool = False
    """Texts in prompt, completion, chosen and rejected are turns of user and assistant."""
    sequence_length: int | None = None
    """Tokens of one sequence; a longer sample is handled as `longer` says."""
    longer: Longer = "refuse"
    max_bad: int = 0
    """Bad records that are left out; one more ends the packing."""

    def open_tokenizer(self) -> HuggingFaceTokenizer:
        """The tokenizer."""
        return HuggingFaceTokenizer(Path(self.tokenizer), eos=self.eos)

    def open_encoder(self) -> ChatEncoder:
        """Tokenizer and template."""
        return ChatEncoder(self.open_tokenizer(), self.open_template(), self.trained)

    def open_template(self) -> ChatTemplate | None:
        """The chat template; None where there is none, which plain completions do not need."""
        file = Path(self.template) if self.template else None
        folder = Path(self.tokenizer).parent
        return open_template(folder, file=file, variables=self.variables, date=self.date)


@dataclass
class ChatCounts:
    """What happened to the records of one unit, or of all."""

    num_samples: int = 0
    num_trained: int = 0
    """Trained tokens."""
    num_dropped: int = 0
    """Samples longer than the sequence, which were left out."""
    num_truncated: int = 0
    num_without_targets: int = 0
    """Samples in which no token is trained, or none was left by truncation; they are left out."""
    num_rendered: int = 0
    """Samples that the chat template has rendered; texts and given tokens are not."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Samples by kind: chats or pairs."""
    ends: dict[str, int] = field(default_factory=dict)
    """Trained turns by their last trained token; "" where that is text."""
    unread: dict[str, int] = field(default_factory=dict)
    """Records by what the template does not write, a field or turns of a role: it is not in the dataset."""
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    """Fact, place and hint of each bad record."""

    def add(self, other: "ChatCounts") -> None:
        """Add the counts of another unit."""
        self.num_samples += other.num_samples
        self.num_trained += other.num_trained
        self.num_dropped += other.num_dropped
        self.num_truncated += other.num_truncated
        self.num_without_targets += other.num_without_targets
        self.num_rendered += other.num_rendered
        for own, others in (
            (self.kinds, other.kinds),
            (self.ends, other.ends),
            (self.unread, other.unread),
        ):
            for name, count in others.items():
                own[name] = own.get(name, 0) + count
        self.bad += other.bad

    @staticmethod
    def of(values: dict[str, Any]) -> "ChatCounts":
        """Counts that were written as JSON."""
        return ChatCounts(**{**values, "bad": [tuple(each) for each in values["bad"]]})

    def require_few_bad(self, max_bad: int) -> None:
        """DataError of the first bad record where there are more than allowed."""
        if len(self.bad) > max_bad:
            fact, where, hint = self.bad[0]
            if max_bad:
                fact = f"{len(self.bad)} records are bad, and {max_bad} are allowed; the first: {fact}"
            raise DataError(fact, where=where, hint=hint)
