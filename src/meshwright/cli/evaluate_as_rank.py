"""Work as one rank of a mesh: of this process alone, or of those that a launcher started."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def as_rank(device: str, work: Callable[[], Result]) -> Result | None:
    """The result of the work on rank 0, and None on the others; leaves the world.

    An error of a launched rank ends it with the exit code of the error, so that the launcher ends the others.
    """
    from meshwright.cli.train import ended_with_error
    from meshwright.launch.launched import launched_rank
    from meshwright.mesh import join_world, leave_world

    try:
        found = work()
        is_first = join_world(device).is_first
    except BaseException as error:
        if launched_rank() is not None:
            ended_with_error(error)
        leave_world()
        raise
    leave_world()
    return found if is_first else None
