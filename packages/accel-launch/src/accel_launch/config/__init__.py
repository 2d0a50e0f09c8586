"""Config files of the launcher: their location and content, reading and writing them."""

from accel_launch.config.file import LaunchConfig as LaunchConfig
from accel_launch.config.file import load_config_from_file as load_config_from_file
from accel_launch.config.paths import config_path as config_path
from accel_launch.config.paths import default_config_file as default_config_file
from accel_launch.config.write import write_basic_config as write_basic_config
