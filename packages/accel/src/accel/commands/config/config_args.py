"""Reading config files, under its documented path: re-exports of accel-launch."""

from accel_launch.config.file import LaunchConfig as BaseConfig  # noqa: F401
from accel_launch.config.file import SageMakerConfig as SageMakerConfig
from accel_launch.config.file import load_config_from_file as load_config_from_file
from accel_launch.config.paths import default_config_file as default_config_file
