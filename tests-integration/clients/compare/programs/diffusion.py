"""diffusers: a UNet trained in the style of its examples, and pipelines whose models are offloaded."""

from __future__ import annotations

import logging
import math
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import numpy
import tiny
import torch
from accelerate import Accelerator, cpu_offload, cpu_offload_with_hook
from accelerate.logging import get_logger
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from packaging import version
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import CLIPTextConfig, CLIPTextModel

logger = get_logger(__name__, log_level="INFO")

BLOCKS: dict[str, Any] = {
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "sample_size": 8,
}


class Pictures(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Small pictures, each from its own seed."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input": torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(row)) * 2 - 1}


def train(folder: Path, steps: int = 8, checkpoint: str | None = None) -> dict[str, Any]:
    """Train a UNet to predict noise: averages of its weights, checkpoints by hooks, tracking, samples."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_config=ProjectConfiguration(
            project_dir=str(folder), logging_dir=str(folder / "logs"), total_limit=2
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=600))],
    )
    if version.parse(accelerate.__version__) < version.parse("0.16.0"):
        raise RuntimeError("hooks of save_state and load_state are needed")
    logging.basicConfig(level=logging.INFO)
    logger.info("%s processes", accelerator.num_processes, main_process_only=False)
    set_seed(11)
    model = UNet2DModel(
        **BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        dropout=0.1,
    )
    average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
    hooks: list[list[str]] = []

    def save_model_hook(models: list[Any], weights: list[Any], output: str) -> None:
        hooks.append(["save", *(type(model).__name__ for model in models), str(len(weights))])
        if accelerator.is_main_process:
            average.save_pretrained(os.path.join(output, "unet_ema"))
            for model in models:
                model.save_pretrained(os.path.join(output, "unet"))
                weights.pop()

    def load_model_hook(models: list[Any], output: str) -> None:
        hooks.append(["load", *(type(model).__name__ for model in models)])
        loaded = EMAModel.from_pretrained(os.path.join(output, "unet_ema"), UNet2DModel)
        average.load_state_dict(loaded.state_dict())
        average.to(accelerator.device)
        while models:
            saved = UNet2DModel.from_pretrained(output, subfolder="unet")
            model = models.pop()
            model.register_to_config(**saved.config)
            model.load_state_dict(saved.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    noise_scheduler = DDPMScheduler(num_train_timesteps=50, beta_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-6)
    loader = torch.utils.data.DataLoader(Pictures(), batch_size=2)
    schedule = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=2 * 2, num_training_steps=len(loader) * 4
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    average.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("train", {"steps": steps})
    per_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    step = 0
    skip = 0
    if checkpoint:
        accelerator.load_state(str(folder / checkpoint))
        step = int(checkpoint.split("-")[1])
        skip = step % per_epoch * accelerator.gradient_accumulation_steps
    losses, norms, rates = [], [], []
    for _ in range(step // per_epoch, math.ceil(steps / per_epoch)):
        model.train()
        batches = accelerator.skip_first_batches(loader, skip) if skip else loader
        skip = 0
        for batch in batches:
            clean = batch["input"]
            noise = torch.randn(clean.shape)
            times = torch.randint(0, 50, (len(clean),)).long()
            noisy = noise_scheduler.add_noise(clean, noise, times)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(noisy, times).sample.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().repeat(2)).mean().item())
            rates.append(schedule.get_last_lr()[0])
            if accelerator.sync_gradients:
                average.step(model.parameters())
                step += 1
                accelerator.log({"loss": losses[-1], "lr": rates[-1]}, step=step)
                if step % 3 == 0 and accelerator.is_main_process:
                    accelerator.save_state(str(folder / f"checkpoint-{step}"))
        accelerator.wait_for_everyone()
    unet = accelerator.unwrap_model(model)
    found = {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "step": step,
        "hooks": hooks,
        "weights": tiny.weights_of(unet),
        "averages": sum(value.double().pow(2).sum().item() for value in average.shadow_params),
    }
    if accelerator.is_main_process:
        found["drawn"] = sample(accelerator, unet, average, noise_scheduler, folder, step)
    accelerator.end_training()
    return found


def sample(
    accelerator: Accelerator,
    unet: UNet2DModel,
    average: EMAModel,
    noise_scheduler: DDPMScheduler,
    folder: Path,
    step: int,
) -> float:
    """Draw pictures with the averaged weights, log them, and save the pipeline; returns a figure of them."""
    average.store(unet.parameters())
    average.copy_to(unet.parameters())
    pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(
        generator=torch.Generator().manual_seed(0), batch_size=2, num_inference_steps=4, output_type="np"
    ).images
    tracker = accelerator.get_tracker("tensorboard", unwrap=True)
    tracker.add_images("samples", (drawn * 255).round().astype("uint8").transpose(0, 3, 1, 2), step)
    average.restore(unet.parameters())
    pipeline.save_pretrained(folder / "pipeline")
    return float(numpy.abs(drawn).astype(float).sum())


def logged(folder: Path) -> dict[str, Any]:
    """Read what was logged, and delete the files, whose names have the time."""
    events = EventAccumulator(str(folder / "train"))
    events.Reload()
    tags = events.Tags()
    found = {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]}
    found["pictures"] = [[tag, len(events.Images(tag))] for tag in tags["images"]]
    shutil.rmtree(folder)
    return dict(sorted(found.items()))


def unconditional(folder: Path) -> dict[str, Any]:
    """Train, and, with one process, continue from the middle of an epoch."""
    found = {"whole": train(folder / "run")}
    if os.environ.get("WORLD_SIZE", "1") == "1":
        found["resumed"] = train(folder / "run", checkpoint="checkpoint-3")
    if os.environ.get("RANK", "0") == "0":
        found["logged"] = logged(folder / "run/logs")
    return found


def make_pipeline() -> StableDiffusionPipeline:
    """Return a pipeline of small models with random weights, without a tokenizer."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        **BLOCKS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    )
    vae = AutoencoderKL(
        block_out_channels=[4, 8],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=1,
    )
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    text = CLIPTextModel(CLIPTextConfig(vocab_size=50, max_position_embeddings=8, **sizes))
    return StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=text,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def draw(pipeline: StableDiffusionPipeline) -> float:
    """Return a figure of a picture that the pipeline draws."""
    pipeline.set_progress_bar_config(disable=True)
    text = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(2))
    drawn = pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=-text,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        height=16,
        width=16,
    ).images
    return float(drawn.astype(float).sum())


def places_of(pipeline: StableDiffusionPipeline) -> dict[str, list[str]]:
    """Return each model's hook and the devices of its weights."""
    models = {"unet": pipeline.unet, "vae": pipeline.vae, "text_encoder": pipeline.text_encoder}
    return {
        name: [
            type(getattr(model, "_hf_hook", None)).__name__,
            *sorted({str(value.device) for value in model.parameters()}),
        ]
        for name, model in models.items()
    }


def offload_models(folder: Path) -> dict[str, Any]:
    """Draw with full models that come one after the other, by diffusers and by accelerate's function."""
    found: dict[str, Any] = {}
    pipeline = make_pipeline()
    found["plain"] = [draw(pipeline), places_of(pipeline)]
    pipeline.enable_model_cpu_offload(device="cpu")
    found["models"] = [draw(pipeline), draw(pipeline), places_of(pipeline)]
    pipeline.remove_all_hooks()
    found["removed"] = [draw(pipeline), places_of(pipeline)]
    hook = None
    for name in ("text_encoder", "unet", "vae"):
        model, hook = cpu_offload_with_hook(
            getattr(pipeline, name), torch.device("cpu"), prev_module_hook=hook
        )
        setattr(pipeline, name, model)
    found["hooks"] = [draw(pipeline), places_of(pipeline)]
    hook.offload()
    found["again"] = [draw(pipeline), places_of(pipeline)]
    return found


def offload_layers(folder: Path) -> dict[str, Any]:
    """Draw with components offloaded by hand, whose weights come for each layer.

    diffusers has the inputs on the meta device where the first component is offloaded and another is not.
    """
    found: dict[str, Any] = {}
    for names in ("unet", "vae", "text_encoder unet vae", "text_encoder", "text_encoder unet"):
        pipeline = make_pipeline()
        for name in names.split():
            cpu_offload(getattr(pipeline, name), torch.device("cpu"))
        found[names] = [places_of(pipeline)]
        try:
            found[names].append(draw(pipeline))
        except (RuntimeError, NotImplementedError) as error:
            found[names].append(f"{type(error).__name__}: {error}")
    return found


def place(folder: Path) -> dict[str, Any]:
    """Draw with a pipeline that is loaded to its places, and with a model partly on the disk."""
    make_pipeline().save_pretrained(folder / "pipeline")
    missing = {"tokenizer": None, "safety_checker": None, "feature_extractor": None}
    loaded = StableDiffusionPipeline.from_pretrained(folder / "pipeline", device_map="balanced", **missing)
    found: dict[str, Any] = {"balanced": [draw(loaded), places_of(loaded), map_of(loaded)]}
    loaded.reset_device_map()
    found["reset"] = [draw(loaded), places_of(loaded), map_of(loaded)]
    loaded.unet = UNet2DConditionModel.from_pretrained(
        folder / "pipeline/unet",
        device_map="auto",
        max_memory={"cpu": "60KB"},
        offload_folder=folder / "offloaded",
    )
    on_meta = sorted(name for name, value in loaded.unet.named_parameters() if value.is_meta)
    found["disk"] = [draw(loaded), on_meta, map_of(loaded.unet)]
    return found


def map_of(model: Any) -> dict[str, str]:
    """Return the device map of a model or a pipeline."""
    return {name: str(device) for name, device in sorted((model.hf_device_map or {}).items())}


if __name__ == "__main__":
    tiny.run_parts([unconditional, offload_models, offload_layers, place])
