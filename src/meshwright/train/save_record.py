"""What a run writes and prints of its checkpoints: how long a save took, and what failed."""

from collections.abc import Callable

from meshwright.checkpoint.saver import SaveOutcome
from meshwright.checkpoint.upload import UploadOutcome
from meshwright.observe.events import EventWriter
from meshwright.train import messages

_NOTABLE_WAIT_SECONDS = 1.0


class SaveRecord:
    """Records saves and uploads as events of this rank, and prints what a user should know."""

    def __init__(
        self, events: EventWriter, print_line: Callable[[str], None], *, asks_for_background: bool
    ) -> None:
        self._events, self._print = events, print_line
        self._warns_of_waiting = asks_for_background

    def started(self, outcome: SaveOutcome) -> None:
        """As `ended`. Says once that saves are not in the background, where the run asks for that."""
        self.ended(outcome)
        if self._warns_of_waiting and not outcome.is_background:
            self._warns_of_waiting = False
            self._events.write("warning", step=outcome.step, text=messages.NO_HOST_COPY)
            self._print(messages.NO_HOST_COPY)

    def ended(self, outcome: SaveOutcome) -> None:
        """A save is complete, or has failed."""
        if outcome.error is not None:
            self._events.write("warning", step=outcome.step, text=str(outcome.error))
            self._print(messages.save_failed(outcome.step, outcome.error))
            return
        assert outcome.folder is not None
        self._events.write(
            "local_checkpoint" if outcome.is_local else "checkpoint",
            step=outcome.step,
            folder=outcome.folder.name,
            stall_seconds=round(outcome.stall_seconds, 4),
            waited_seconds=round(outcome.waited_seconds, 4),
            write_seconds=round(outcome.write_seconds, 4),
        )
        if outcome.waited_seconds > _NOTABLE_WAIT_SECONDS:
            self._print(messages.save_waited(outcome))

    def uploaded(self, outcome: UploadOutcome) -> None:
        """The copy to the second place is complete, or has failed."""
        if outcome.error is None:
            self._events.write("upload", folder=outcome.step_name, seconds=round(outcome.seconds, 3))
            return
        self._events.write("warning", text=str(outcome.error))
        self._print(messages.upload_failed(outcome.step_name, outcome.error))
