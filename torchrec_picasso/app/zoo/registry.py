"""Builds samples and model of a configuration."""

from __future__ import annotations

import torch
from torch import nn

from torchrec_picasso.app.config import DataConfig, TrainConfig
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.click_source import ClickSource
from torchrec_picasso.app.zoo.data.criteo import CriteoSource
from torchrec_picasso.app.zoo.data.field_specs import draw_fields
from torchrec_picasso.app.zoo.data.fields import FieldsSource
from torchrec_picasso.app.zoo.data.generated import GeneratedSource
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.dlrm import build_dlrm
from torchrec_picasso.app.zoo.feature_groups import FeatureGroups
from torchrec_picasso.app.zoo.kinds import DLRM
from torchrec_picasso.app.zoo.model_kinds import groups_of, make_head
from torchrec_picasso.errors import ConfigError


def make_source(data: DataConfig, seed: int) -> BatchSource:
    """Opens the samples of a run: a file if ``data.path`` names one, else generated samples.

    Raises:
        PicassoError: If a file of clicks cannot be used, or ``max_rows`` is too small for fields.
    """
    if data.kind in ("clicks", "stream"):
        return ClickSource(data, seed)
    if data.kind == "fields":
        fields = draw_fields(data.num_tables, data.max_rows, seed)
        return FieldsSource(fields, data.batch_size, data.heldout_steps, seed)
    return GeneratedSource(data, seed) if data.path is None else CriteoSource(data)


def build_model(config: TrainConfig, source: BatchSource) -> nn.Module:
    """Builds the unsharded model of a run; its forward maps a batch to the loss and an output.

    Tables are on the meta device, the rest is initialised from the seed.

    Raises:
        ConfigError: If the model is unknown, or does not fit the data.
    """
    if config.model.kind == DLRM:
        if not isinstance(source, (CriteoSource, GeneratedSource)) or source.num_tasks > 1:
            raise ConfigError(
                "model.kind: a dlrm reads Criteo's columns and learns one label; choose another "
                "model, or set data.kind to criteo and data.num_tasks to 1"
            )
        return build_dlrm(config.model, source.tables, config.seed)
    groups = groups_of(config.model, config.features or {}, source, config.data.max_history)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        embeddings = FeatureGroups(groups, source.num_rows)
        return ClickModel(embeddings, make_head(config.model, embeddings, source))


def check_source(source: BatchSource, world_size: int) -> None:
    """Reads one held-out and one training batch, so bad input is found before ranks start.

    Raises:
        PicassoError: If the file is missing, empty, malformed at its head, or too short.
    """
    for batches in (source.heldout(0, world_size), source.batches(0, world_size)):
        next(iter(batches))


def check_run(config: TrainConfig, world_size: int) -> None:
    """Builds samples and model once, so a bad configuration is found before ranks start.

    Raises:
        PicassoError: If the data or the model cannot be used.
    """
    source = make_source(config.data, config.seed)
    if config.data.window_steps is not None:
        num_steps = source.steps_in_order(world_size) if isinstance(source, ClickSource) else 0
        if config.steps + config.data.window_steps > num_steps:
            raise ConfigError(
                f"data.window_steps: {config.steps} steps and a window of "
                f"{config.data.window_steps} are more than this data has in time order, "
                f"{num_steps}; lower steps or batch_size, or set window_steps to null"
            )
    check_source(source, world_size)
    build_model(config, source)
