"""Where a project keeps its checkpoints and logs, and how many checkpoints it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProjectConfiguration:
    """Configuration of a project's folders.

    Args:
        project_dir: Folder of the project's data; needed for automatic naming.
        logging_dir: Folder of the logs; by default the project's folder.
        automatic_checkpoint_naming: Whether checkpoints go to
            `<project_dir>/checkpoints/checkpoint_<iteration>`.
        total_limit: How many of these are kept; the oldest are deleted first. None keeps all.
        iteration: Number of the next checkpoint, if it is above the numbers of all existing ones.
        save_on_each_node: Whether every machine writes the shared files too, for machines without a shared
            disk.
        incremental_saves: Whether a file that is unchanged since the last checkpoint is linked to it instead
            of written again, and frozen weights have their own file.

    Raises:
        ValueError: If `total_limit` is below 1 or `iteration` below 0.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    incremental_saves: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(
                f"total_limit must be at least 1, or None to keep all checkpoints, not {self.total_limit!r}."
            )
        if self.iteration < 0:
            raise ValueError(f"iteration must be at least 0, not {self.iteration!r}.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's folder, and with it the folder of the logs if that is not set.

        Args:
            project_dir: The folder.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
