"""FSDP under its documented path: re-exports."""

from accel.engines.fsdp_steps import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accel.engines.fsdp_steps import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from accel.engines.fsdp_steps import fsdp2_apply_ac as fsdp2_apply_ac
from accel.engines.fsdp_steps import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accel.engines.fsdp_steps import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accel.engines.fsdp_steps import fsdp2_prepare_model as fsdp2_prepare_model
from accel.engines.fsdp_steps import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from accel.engines.fsdp_steps import get_parameters_from_modules as get_parameters_from_modules
from accel.engines.initial_weights import ensure_weights_retied as ensure_weights_retied
from accel.saving.fsdp_functions import load_fsdp_model as load_fsdp_model
from accel.saving.fsdp_functions import load_fsdp_optimizer as load_fsdp_optimizer
from accel.saving.fsdp_functions import save_fsdp_model as save_fsdp_model
from accel.saving.fsdp_functions import save_fsdp_optimizer as save_fsdp_optimizer
from accel_ckpt.sharded.merge import merge_fsdp_weights as merge_fsdp_weights
from accel_optim.scaler import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
