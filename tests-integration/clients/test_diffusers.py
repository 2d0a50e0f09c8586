"""diffusers on accel: pipelines whose models are offloaded to memory and to the disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_state")]


def make_parts() -> dict[str, Any]:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=8,
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
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    return {"unet": unet, "vae": vae, "text_encoder": text, "scheduler": scheduler}


MISSING = {"tokenizer": None, "safety_checker": None, "feature_extractor": None}


def make(**parts: Any) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(**{**make_parts(), **parts}, **MISSING, requires_safety_checker=False)


def draw(pipeline: StableDiffusionPipeline) -> numpy.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    text = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(2))
    return pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=-text,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        height=16,
        width=16,
    ).images


@pytest.fixture(scope="module")
def image() -> numpy.ndarray:
    found = draw(make())
    assert found.shape == (1, 16, 16, 3)
    assert found.std() > 0
    return found


def test_models_come_to_the_device_one_after_the_other(image: numpy.ndarray):
    pipeline = make()
    pipeline.enable_model_cpu_offload(device="cpu")

    assert type(pipeline.unet._hf_hook).__name__ == "CpuOffload"
    for _ in range(2):
        assert numpy.array_equal(draw(pipeline), image)


def test_each_layer_comes_to_the_device(image: numpy.ndarray):
    pipeline = make()
    pipeline.enable_sequential_cpu_offload(device="cpu")

    assert all(parameter.is_meta for parameter in pipeline.unet.parameters())
    for _ in range(2):
        assert numpy.array_equal(draw(pipeline), image)

    pipeline.remove_all_hooks()

    assert not any(parameter.is_meta for parameter in pipeline.unet.parameters())
    assert numpy.array_equal(draw(pipeline), image)


def test_a_model_is_spread_over_memory_and_disk(image: numpy.ndarray, tmp_path: Path):
    make_parts()["unet"].save_pretrained(tmp_path / "unet")

    unet = UNet2DConditionModel.from_pretrained(
        tmp_path / "unet",
        device_map="auto",
        max_memory={"cpu": "60KB"},
        offload_folder=tmp_path / "offloaded",
    )

    assert set(unet.hf_device_map.values()) == {"cpu", "disk"}
    assert any(parameter.is_meta for parameter in unet.parameters())
    assert numpy.array_equal(draw(make(unet=unet)), image)


def test_a_pipeline_is_loaded_to_its_places(image: numpy.ndarray, tmp_path: Path):
    make().save_pretrained(tmp_path)

    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path, device_map="balanced", **MISSING)

    assert numpy.array_equal(draw(pipeline), image)
