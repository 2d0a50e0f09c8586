"""MLflow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import flatten, named_images, numbers, plain, warn_left_out
from accel_state import env
from accel_state.imports.packages import require


class MLflowTracker(GeneralTracker):
    """Logs to a run of MLflow.

    It goes to the server or store that `mlflow.set_tracking_uri` or MLFLOW_TRACKING_URI names, otherwise
    where MLflow chooses. The environment comes before the arguments: MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID,
    MLFLOW_TAGS (JSON) and MLFLOW_NESTED_RUN. MLflow has names of letters, digits and `_-. :/` alone: other
    characters become "_".

    Args:
        experiment_name: The experiment, which is made where there is none of this name.
        logging_dir: Where a new experiment keeps its artifacts; by default MLflow chooses.
        run_id: A run to continue.
        tags: Tags of the run, as a dict or its JSON.
        nested_run: Make it a child of the active run.
        run_name: The name of a new run.
        description: Text about the run.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = env.raw("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = env.raw("MLFLOW_RUN_ID") or run_id
        tags = env.raw("MLFLOW_TAGS") or tags
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        nested = env.raw("MLFLOW_NESTED_RUN")
        self.nested_run = env.str_to_bool(nested) == 1 if nested else bool(nested_run)
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None
        self._mlflow: Any = None

    @property
    def tracker(self) -> Any:
        """The active run, as `mlflow.start_run` returns it."""
        return self.active_run

    @on_main_process
    def start(self) -> None:
        """Begin the run, or continue the one of `run_id`."""
        self._mlflow = require("mlflow", extra="mlflow")
        self.active_run = self._mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store `values` as parameters, nested ones as `outer/inner`; MLflow cuts text at 6000 characters."""
        flat = flatten(plain(values))
        self._mlflow.log_params({_valid_name(key): value for key, value in flat.items()}, run_id=self._id)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, nested ones as `outer/inner`; `kwargs` go to `mlflow.log_metrics`."""
        metrics, rest = numbers(values)
        warn_left_out(self.name, "numbers alone", rest)
        named = {_valid_name(key): value for key, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._id, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, each under its own name; `kwargs` go to `mlflow.log_image`."""
        for name, image in named_images(values):
            # To the active run: this function of MLflow takes no run_id.
            self._mlflow.log_image(image, key=_valid_name(name), step=step or 0, **kwargs)

    @on_main_process
    def _log_rows(
        self, table_name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        """Append rows to the artifact `table_name.json`, with a column `step` if there is a step."""
        table = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
        if step is not None:
            table.setdefault("step", [step] * len(rows))
        self._mlflow.log_table(table, f"{table_name}.json", run_id=self._id, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly; `save_kwargs` go to `mlflow.log_figure`."""
        self._mlflow.log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store all files of a folder."""
        self._mlflow.log_artifacts(local_dir, artifact_path, run_id=self._id)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file."""
        self._mlflow.log_artifact(local_path, artifact_path, run_id=self._id)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self._mlflow.end_run()

    @property
    def _id(self) -> str:
        """This run's, as the script may have another active one inside it."""
        return str(self.active_run.info.run_id)

    def _experiment(self) -> str | None:
        if self.experiment_name is None:
            return None  # MLflow's own choice
        found = self._mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else Path(self.logging_dir).resolve().as_uri()
        return str(self._mlflow.create_experiment(self.experiment_name, artifact_location=place))


def _valid_name(name: str) -> str:
    # What MLflow allows in names.
    return re.sub(r"[^\w\-. :/]", "_", name)
